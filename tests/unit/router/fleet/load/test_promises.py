"""Unit tests of promises: how much delay the requests of a decode node can bear."""

from __future__ import annotations

import math

import pytest

from router.fleet.load.promises import Promises

STEP_S = 0.1


def slack_s(promises: Promises, now: float) -> float:
    """With steps that are as long as the margin makes them."""
    return promises.slack_s(now, STEP_S / 1.15)


def test_whoever_has_promised_nothing_may_pause_forever() -> None:
    assert slack_s(Promises(), 0.0) == math.inf


def test_the_tightest_promise_counts_until_it_is_closed() -> None:
    promises = Promises()
    promises.open(finish_by=10.0, num_steps=20, arrives_at=0.0)
    tight = promises.open(finish_by=4.0, num_steps=20, arrives_at=0.0)
    assert slack_s(promises, 1.0) == pytest.approx(1.0)
    promises.close(tight)
    assert slack_s(promises, 1.0) == pytest.approx(7.0)


def test_before_its_kv_is_there_a_request_has_all_steps_before_it() -> None:
    promises = Promises()
    promises.open(finish_by=5.0, num_steps=20, arrives_at=2.0)
    assert slack_s(promises, 0.0) == pytest.approx(1.0)
    assert slack_s(promises, 2.5) == pytest.approx(0.5)  # it is late


def test_steps_on_time_leave_the_spare_time_as_it_is_and_pauses_eat_it_up() -> None:
    promises = Promises()
    promise = promises.open(finish_by=5.0, num_steps=20, arrives_at=0.0)
    promises.num_steps = 7
    promises.begin_promise(promise)
    assert slack_s(promises, 1.0) == pytest.approx(2.0)
    promises.num_steps += 10
    assert slack_s(promises, 2.0) == pytest.approx(2.0)
    assert slack_s(promises, 3.0) == pytest.approx(1.0)
    promises.num_steps += 100  # longer than long ones: nobody knows how long
    assert slack_s(promises, 3.0) == pytest.approx(2.0)
