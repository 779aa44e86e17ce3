"""Tests of scheduled faults: they happen as written, and the report has their true cost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ConfigError
from loadtest.drills.audit import Auditor
from loadtest.drills.faults import Fault, FaultEvent, check_schedule
from loadtest.drills.schedule import Schedule
from loadtest.drills.site import Site, parse_pids, write_whole
from loadtest.load.clock import RunClock
from loadtest.load.generate import Lengths
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.fault_report import FaultReport, fault_line, report_faults
from loadtest.run import RunResult
from loadtest.slo import Slo
from tests.fakes.outside.load_targets import TICK_S, Answer, ScriptedTarget, even, run_virtually


@pytest.mark.parametrize(
    ("text", "act", "node", "spec", "begin_s", "end_s"),
    [
        ("kill p0 @30s", "kill", "p0", "", 30, 30),
        ("  stop  d0 @1.5-2.5s", "stop", "d0", "", 1.5, 2.5),
        ("restart router @4s", "restart", "router", "", 4, 4),
        ("drop 1% of pushes @40-50s", "inject", "", "fail_post=0.01", 40, 50),
        ("drop 2.5% of messages on p1 @40s-50s", "inject", "p1", "drop=0.025", 40, 50),
        ("inject delay=1ms-20ms,seed=3 on d0 @1-2s", "inject", "d0", "delay=1ms-20ms,seed=3", 1, 2),
    ],
)
def test_what_is_written(
    text: str, act: str, node: str, spec: str, begin_s: float, end_s: float
) -> None:
    fault = Fault.parse(text)
    assert (fault.act, fault.node, fault.spec) == (act, node, spec)
    assert (fault.begin_s, fault.end_s) == (begin_s, end_s)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be like"),
        ("kill @30s", "must be like"),
        ("kill p0", "must be like"),
        ("kill p0 @30", "must be like"),
        ("explode p0 @30s", "must be like"),
        ("kill p0 @30-40s", "kill must have one time"),
        ("stop p0 @30s", "stop must have a time of its end"),
        ("stop p0 @30-20s", "stop must have a time of its end"),
        ("drop 1% of pushes @40s", "inject must have a time of its end"),
        ("drop 101% of pushes @40-50s", "at most 100%"),
        ("drop 1% of hints @40-50s", "must be like"),
    ],
)
def test_what_is_none_is_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^fault: .*{problem}"):
        Fault.parse(text)


def test_a_fault_that_the_run_would_not_see_is_refused() -> None:
    late, early = Fault.parse("kill p0 @9s"), Fault.parse("stop p0 @2-3s")
    assert check_schedule([late, early], 10.0) == (early, late)
    for duration_s in (9.0, None):
        with pytest.raises(ConfigError, match="fault: must end before duration_s"):
            check_schedule([late], duration_s)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("restart p0 @1s", r"only processes that the load test started \(--up\)"),
        ("drop 1% of pushes @1-2s", r"only processes that the load test started \(--up\)"),
        ("kill p1 @1s", "p1 must be one of p0 "),
    ],
)
def test_what_cannot_be_done_from_here_is_one_line(text: str, problem: str) -> None:
    site = Site({"p0": os.getpid()})
    with pytest.raises(ConfigError, match=f"^fault: {problem}"):
        site.check([Fault.parse(text)])
    site.check([Fault.parse("kill p0 @1s")])


def test_pids(tmp_path: Path) -> None:
    assert parse_pids([f"p0={os.getpid()}"]) == {"p0": os.getpid()}
    for wrong in ("p0", "p0=", "=3", "p0=x", "p0=-4", "p0=1", "p0=99999999"):
        with pytest.raises(ConfigError, match=r"^pid: "):
            parse_pids([wrong])
    write_whole(tmp_path / "p0", "drop=1")
    assert [one.name for one in tmp_path.iterdir()] == ["p0"]


def state_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until(process: subprocess.Popen[bytes], states: str) -> None:
    async with asyncio.timeout(20):
        while state_of(process) not in states:  # noqa: ASYNC110  # a process sets no event
            await asyncio.sleep(0.005)


@pytest.mark.medium
def test_real_processes_stop_go_on_and_die() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    site = Site({"p0": process.pid})

    async def scene() -> list[FaultEvent]:
        stops = Schedule([Fault.parse("stop p0 @0.1-0.4s")], site, None)
        playing = asyncio.create_task(stops.play(RunClock(time.perf_counter)))
        await until(process, "T")
        await until(process, "SR")
        await playing
        kills = Schedule([Fault.parse("kill p0 @0.1s")], site, None)
        await kills.play(RunClock(time.perf_counter))
        await kills.check_leaks()
        return stops.events + kills.events

    try:
        events = asyncio.run(scene())
        assert process.wait(20) == -signal.SIGKILL
    finally:
        process.kill()
    assert [event.fault.act for event in events] == ["stop", "kill"]
    assert events[0].ended_s > events[0].began_s
    assert all(event.began_s >= 0.1 - TICK_S for event in events)


@pytest.mark.medium
def test_a_run_that_ends_early_leaves_nobody_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def scene() -> None:
        schedule = Schedule([Fault.parse("stop p0 @0-99s")], Site({"p0": process.pid}), None)
        playing = asyncio.create_task(schedule.play(RunClock(time.perf_counter)))
        await until(process, "T")
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await until(process, "SR")
        assert schedule.events == []

    try:
        asyncio.run(scene())
    finally:
        process.kill()
        process.wait()


def test_a_router_that_does_not_answer_is_a_finding() -> None:
    found = asyncio.run(Auditor("127.0.0.1:1", "").look())
    assert len(found.audit.problems) == 1
    assert found.audit.problems[0].startswith("127.0.0.1:1 does not answer")


def run(script: Any, rate: float = 20.0) -> tuple[LoadPlan, RunResult]:
    plan = LoadPlan(
        load=OpenLoop(rate_per_s=rate, arrivals="constant"),
        input_lengths=Lengths(4),
        output_lengths=Lengths(5),
        warmup_s=2.0,
        duration_s=20.0,
        slo=Slo.parse("ttft=0.2"),
        max_lag_s=2 * TICK_S,
    )
    return plan, run_virtually(plan, ScriptedTarget(script))


def costs(ran: tuple[LoadPlan, RunResult], *texts: str) -> list[FaultReport]:
    plan, result = ran
    events = [
        FaultEvent(fault=fault, began_s=fault.begin_s, ended_s=fault.end_s)
        for fault in map(Fault.parse, texts)
    ]
    return report_faults(plan, result.records, events, 20.0)


@pytest.mark.medium
def test_what_a_fault_cost_is_what_the_server_did() -> None:
    def script(number: int, length: int) -> Answer:
        scheduled_s = number / 20
        if 8.0 <= scheduled_s < 8.5:  # ten in a row break
            return Answer(frames=((0.05, 1),), error="UNAVAILABLE")
        slow = 8.5 <= scheduled_s < 11.0 and number % 2  # then every other one is late
        return even(0.5 if slow else 0.1, 0.01)(number, length)

    [cost] = costs(run(script), "kill p0 @8s")
    assert cost.baseline_share == 1.0
    assert cost.baseline_goodput_per_s == pytest.approx(20.0, abs=0.2)
    assert cost.window_s == 1.0
    assert cost.lowest_share == pytest.approx(5 / 20, abs=0.05)  # the worst second: 8.0 to 9.0
    assert cost.lowest_goodput_per_s == pytest.approx(5.0, abs=1.0)
    # The last window with more than one in ten bad ends when the last late ones leave it.
    assert cost.recovery_s == pytest.approx(3.8, abs=0.2)
    assert (cost.num_lost, cost.errors) == (10, {"UNAVAILABLE": 10})
    line = fault_line(cost)
    assert line.startswith("kill p0 @8s (at 8.0 s): good 100% -> 2")
    assert "10 lost (10 UNAVAILABLE), 0 retried" in line


@pytest.mark.medium
def test_what_was_not_hurt_or_does_not_recover_is_said() -> None:
    def script(number: int, length: int) -> Answer:
        return even(0.5 if number >= 300 else 0.1, 0.01)(number, length)  # from 15 s on

    ran = run(script)
    assert costs(ran) == []
    nothing, never = costs(ran, "stop d0 @5-6s", "kill d0 @15s")
    assert (nothing.recovery_s, nothing.lowest_share, nothing.num_lost) == (0.0, 1.0, 0)
    assert "no dip" in fault_line(nothing)
    assert (never.recovery_s, never.lowest_share) == (None, 0.0)
    assert "not recovered" in fault_line(never)
    [unknown] = costs(ran, "kill d0 @1s")
    assert (unknown.baseline_share, unknown.recovery_s) == (None, None)
    assert "nobody asked before it" in fault_line(unknown)
    [few] = costs(run(script, rate=2.0), "kill d0 @10s")
    assert few.window_s == pytest.approx(5.0)


@pytest.mark.medium
def test_the_line_of_a_fault_says_what_leaked() -> None:
    [cost] = costs(run(even(0.1, 0.01)), "kill p0 @8s")
    assert "leaked" not in fault_line(cost)  # nobody looked
    assert fault_line(dataclasses.replace(cost, num_leaked=2)).endswith(", 2 blocks leaked")
