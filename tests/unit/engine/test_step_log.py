"""Unit tests of debug lines of steps: computed, waiting and ended requests; no cost if off."""

from __future__ import annotations

import logging

import pytest

from engine.core.scheduler import Scheduler
from engine.step_log import StepLog
from tests.fakes.engine.engine_parts import FakeRunner, make_request, make_scheduler


def step(scheduler: Scheduler, log: StepLog) -> None:
    scheduled = scheduler.schedule()
    log.note_scheduled(scheduled)
    log.note_result(scheduler.update(scheduled, FakeRunner().execute(scheduled)))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_step_tells_its_requests_and_why_the_first_waiting_one_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_requests=1)
    log = StepLog(scheduler, 1)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 4, max_tokens=2))
    with caplog.at_level(logging.DEBUG, logger="engine.step_log"):
        step(scheduler, log)
        step(scheduler, log)
    assert lines(caplog) == [
        "step 1: 4 tokens of 1 requests (a: 0+4 of 4, 1 blocks); 1 run, 1 wait, 0 parked; 19 of 20 "
        "blocks are free, 0 contents cached, 0 evicted and 0 requests preempted since the last "
        "step; b waits: all 1 places of the batch are taken",
        "step 2: 1 tokens of 1 requests (a: 4+1 of 5, 2 blocks); 1 run, 1 wait, 0 parked; 18 of 20 "
        "blocks are free, 0 contents cached, 0 evicted and 0 requests preempted since the last "
        "step; b waits: all 1 places of the batch are taken",
        "a: FINISHED_LENGTH after 2 output tokens; 0 of 4 prompt tokens were cached, 2 forwards, "
        "0 preemptions",
    ]


def test_a_request_that_lacks_blocks_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(num_blocks=4)
    log = StepLog(scheduler, 8)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 12))
    with caplog.at_level(logging.DEBUG, logger="engine.step_log"):
        step(scheduler, log)
    assert lines(caplog)[0].endswith("b waits: up to 3 blocks needed, 0 kept in reserve")


def test_nothing_is_written_or_looked_up_while_debug_lines_are_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler()
    log = StepLog(scheduler, 8)
    scheduler.add_request(make_request("a"))
    monkeypatch.setattr(StepLog, "_why_waits", lambda self: pytest.fail("looked up"))
    with caplog.at_level(logging.INFO, logger="engine.step_log"):
        step(scheduler, log)
    assert lines(caplog) == []
