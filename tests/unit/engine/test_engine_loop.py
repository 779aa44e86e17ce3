"""Unit tests of EngineLoop: it wakes, it stops, it reports its death once."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from baton.telemetry.round_watch import note_progress
from engine import engine_loop
from engine.engine_loop import EngineLoop
from tests.fakes.time.waiting import TIMEOUT_S, wait_until


class Steps:
    """A step that counts, works off what it was given, and may be told to fail.

    Args:
        work: how many steps there are to do at first.
    """

    def __init__(self, work: int = 0) -> None:
        self.work = work
        self.count = 0
        self.threads: set[int] = set()
        self.error: Exception | None = None

    def __call__(self) -> bool:
        self.threads.add(threading.get_ident())
        self.count += 1
        if self.error is not None:
            raise self.error
        self.work = max(0, self.work - 1)
        return self.work > 0


@pytest.fixture(autouse=True)
def no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a wake can move an idle loop: the tick would hide a lost one."""
    monkeypatch.setattr(engine_loop, "TICK_S", 1000.0)


def never(error: Exception) -> None:
    raise AssertionError("died") from error


def test_it_steps_until_there_is_no_more_to_do_and_then_sleeps() -> None:
    steps = Steps(work=5)
    loop = EngineLoop(steps, never, name="t")
    loop.start()
    wait_until(lambda: steps.work == 0)
    loop.stop()
    assert 5 <= steps.count <= 6  # one more at most, to find out that it stops


def test_a_long_step_may_show_that_it_is_not_stuck() -> None:
    shows, goes_on = threading.Event(), threading.Event()

    def step() -> bool:
        note_progress()
        shows.set()
        goes_on.wait(TIMEOUT_S)
        return False

    loop = EngineLoop(step, never, name="t")
    assert loop.rounds.num_ended == 0
    loop.start()
    assert shows.wait(TIMEOUT_S)
    assert (loop.rounds.num_ended, loop.rounds.in_round) == (1, True)
    note_progress()  # of a thread that nobody watches
    assert loop.rounds.num_ended == 1
    goes_on.set()
    loop.stop()


def test_every_wake_is_followed_by_a_step() -> None:
    steps = Steps()
    loop = EngineLoop(steps, never, name="t")
    loop.start()
    for _ in range(200):  # a wake that comes while a step runs must not be lost
        before = steps.count
        loop.wake()
        wait_until(lambda before=before: steps.count > before, "a step after the wake")  # type: ignore[misc]  # a default that keeps the value
    loop.stop()


def test_a_wake_during_a_step_causes_another_one() -> None:
    inside, go_on = threading.Event(), threading.Event()
    count = 0

    def step() -> bool:
        nonlocal count
        count += 1
        inside.set()
        go_on.wait(TIMEOUT_S)
        return False

    loop = EngineLoop(step, never, name="t")
    loop.start()
    assert inside.wait(TIMEOUT_S)
    loop.wake()
    go_on.set()
    wait_until(lambda: count >= 2)
    loop.stop()


def test_only_its_own_thread_steps_and_none_does_after_stop() -> None:
    steps = Steps()
    loop = EngineLoop(steps, never, name="t")
    loop.start()
    wait_until(lambda: steps.count)
    loop.stop()
    count = steps.count
    loop.wake()
    assert steps.count == count
    assert len(steps.threads) == 1
    assert threading.get_ident() not in steps.threads


def test_a_step_that_raises_ends_the_loop_and_is_reported_exactly_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps()
    deaths: list[Exception] = []
    steps.error = RuntimeError("out of luck")
    loop = EngineLoop(steps, deaths.append, name="t")
    with caplog.at_level(logging.CRITICAL):
        loop.start()
        wait_until(lambda: deaths)
        loop.wake()
        loop.stop()
    assert deaths == [steps.error]
    assert steps.count == 1
    assert "cannot continue" in caplog.text


def test_a_death_is_reported_before_anything_that_may_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, order, is_hanging = Steps(), list[str](), threading.Event()
    steps.error = OSError(24, "Too many open files")

    def after_death(error: Exception) -> None:
        assert error is steps.error
        order.append("dump")
        is_hanging.wait(TIMEOUT_S)

    def on_death(error: Exception) -> None:
        assert not caplog.records
        order.append("death")

    loop = EngineLoop(steps, on_death, name="t", after_death=after_death)
    loop.start()
    wait_until(lambda: len(order) == 2)
    assert order == ["death", "dump"]
    is_hanging.set()
    loop.stop()


class Panic(BaseException):
    """Stand in for the exception that a library in Rust raises when it panics."""


def test_a_panic_is_a_death_too() -> None:
    deaths: list[Exception] = []

    def step() -> bool:
        raise Panic("index out of bounds")

    loop = EngineLoop(step, deaths.append, name="t")
    loop.start()
    wait_until(lambda: deaths)
    loop.stop()
    assert str(deaths[0]) == "Panic('index out of bounds')"


def test_work_that_can_wait_ends_itself_when_it_fails_and_not_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, calls = Steps(), list[int]()

    def when_idle() -> bool:
        calls.append(steps.count)
        raise OSError(24, "Too many open files")

    loop = EngineLoop(steps, never, name="t", when_idle=when_idle)
    loop.start()
    wait_until(lambda: calls)
    for _ in range(3):
        after = steps.count + 1
        loop.wake()
        wait_until(partial(has_counted, steps, after))
    loop.stop()
    assert len(calls) == 1
    assert "is given up" in caplog.text


def test_stopping_a_dead_loop_returns() -> None:
    steps = Steps()
    deaths: list[Exception] = []
    steps.error = RuntimeError("x")
    loop = EngineLoop(steps, deaths.append, name="t")
    loop.start()
    wait_until(lambda: deaths)
    loop.stop()
    loop.stop()


def test_what_can_wait_is_done_while_there_is_no_more_to_do() -> None:
    steps, done = Steps(work=3), list[int]()

    def when_idle() -> bool:
        assert steps.work == 0
        done.append(steps.count)
        return len(done) < 4

    loop = EngineLoop(steps, never, name="t", when_idle=when_idle)
    loop.start()
    wait_until(lambda: len(done) == 4)
    loop.stop()
    assert done == [done[0]] * 4  # and then it sleeps


def test_a_wake_does_not_wait_for_what_can_wait() -> None:
    steps = Steps()
    loop = EngineLoop(steps, never, name="t", when_idle=lambda: True)
    loop.start()
    for _ in range(20):
        after = steps.count + 1
        loop.wake()
        wait_until(partial(has_counted, steps, after))
    loop.stop()


def has_counted(steps: Steps, count: int) -> bool:
    return steps.count >= count
