"""Runs against scripted servers on a virtual clock: what is measured is what happened."""

from __future__ import annotations

import asyncio
import gc
import io
import math
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.api.errors import ConfigError
from loadtest.load.generate import Lengths
from loadtest.load.player import Player
from loadtest.load.record import Outcome
from loadtest.load.traces import TraceRequest, write_trace
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, TraceReplay
from loadtest.report.distribution import PER_MILLE, Distribution
from loadtest.report.progress import progress_line, show_progress
from loadtest.run import RunResult
from loadtest.slo import Slo
from tests.fakes.outside.load_targets import TICK_S, Answer, ScriptedTarget, even, run_virtually
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

pytestmark = pytest.mark.large

CONSTANT = OpenLoop(rate_per_s=20.0, arrivals="constant")


def play(target: ScriptedTarget, stop_after_s: float | None = None, **options: Any) -> RunResult:
    defaults: dict[str, Any] = {
        "load": CONSTANT,
        "input_lengths": Lengths(4),
        "output_lengths": Lengths(10),
        "max_lag_s": 2 * TICK_S,
    }
    return run_virtually(LoadPlan(**defaults | options), target, stop_after_s=stop_after_s)


def assert_percentiles(found: Distribution, values: list[float]) -> None:
    """Each within 2 %, or the two ticks that a clock of a millisecond takes."""
    in_order = sorted(values)
    assert found.count == len(in_order)
    for name, per_mille in PER_MILLE.items():
        rank = math.ceil(Fraction(per_mille, 1000) * len(in_order))
        assert getattr(found, name) == pytest.approx(
            in_order[rank - 1], rel=0.02, abs=2 * TICK_S
        ), name


def test_every_percentile_is_that_of_the_script() -> None:
    chance = random.Random(1)
    answers = [
        Answer(
            frames=tuple(
                (chance.lognormvariate(-2.0, 0.7) if k == 0 else chance.uniform(0.02, 0.2), size)
                for k, size in enumerate(chance.choices([1, 1, 2, 4], k=6))
            )
        )
        for _ in range(300)
    ]
    result = play(
        ScriptedTarget(lambda number, length: answers[number]),
        num_requests=300,
        load=OpenLoop(rate_per_s=100.0),
    )
    found = result.summary.latencies
    frames = [answer.frames for answer in answers]
    assert_percentiles(found["ttft_s"], [one[0][0] for one in frames])
    assert_percentiles(found["e2e_s"], [sum(gap for gap, _ in one) for one in frames])
    assert_percentiles(
        found["tpot_s"],
        [sum(gap for gap, _ in one[1:]) / sum(size for _, size in one[1:]) for one in frames],
    )
    assert_percentiles(
        found["itl_s"], [gap / size for one in frames for gap, size in one[1:] for _ in range(size)]
    )
    assert_percentiles(found["frame_gap_s"], [gap for one in frames for gap, _ in one[1:]])
    assert result.summary.tokens.num_checked == 300
    assert result.summary.tokens.num_miscounted == 0
    assert result.summary.lag.kept_up


def test_frames_of_many_tokens_are_not_fast_tokens() -> None:
    result = play(ScriptedTarget(even(0.1, 0.4, per_frame=8)), num_requests=10,
                  output_lengths=Lengths(41))  # fmt: skip
    found = result.summary.latencies
    for name in ("itl_s", "tpot_s"):
        assert found[name].mean == pytest.approx(0.05, rel=0.02)
        assert found[name].p50 == pytest.approx(0.05, rel=0.02)
    assert found["itl_s"].count == 10 * 40
    assert found["frame_gap_s"].p50 == pytest.approx(0.4, rel=0.02)
    assert found["frame_gap_s"].count == 10 * 5


def test_what_a_stalled_server_keeps_waiting_is_not_forgotten() -> None:
    """Avoid coordinated omission: an open loop sees all slow answers, a closed loop only one."""

    def p95_ms(load: Any) -> float:
        target = ScriptedTarget(even(0.01, 0.001), stalls=[(4.0, 5.0)], one_at_a_time=True)
        result = play(target, load=load, duration_s=10.0, output_lengths=Lengths(2))
        assert result.summary.lag.kept_up  # it is the server
        assert result.summary.latencies["ttft_s"].max == pytest.approx(1.0, abs=0.05)
        return result.summary.latencies["ttft_s"].p95 * 1e3

    assert p95_ms(ClosedLoop(concurrency=1)) < 20
    # 20 of 200 requests came in the second of the stall, and some more while the queue was worked
    # off: the slowest 5 % of all waited for more than half of it.
    assert p95_ms(CONSTANT) > 500


def test_a_closed_loop_has_so_many_in_flight() -> None:
    open_now = most = 0

    class Counting(ScriptedTarget):
        async def stream(self, payload: bytes) -> Any:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            async for frame in super().stream(payload):
                yield frame
            open_now -= 1

    result = play(Counting(even(0.1, 0.1)), load=ClosedLoop(concurrency=7), duration_s=10.0)
    assert most == 7
    # An answer takes a second.
    assert result.summary.num_requests == pytest.approx(70, abs=7)
    assert result.summary.output_tokens_per_s == pytest.approx(70, rel=0.05)
    thinking = play(
        ScriptedTarget(even(0.1, 0.1)),
        load=ClosedLoop(concurrency=7, think_s=1.0),
        duration_s=40.0,
    )
    assert thinking.summary.requests_per_s == pytest.approx(3.5, rel=0.2)


def test_only_the_window_is_measured() -> None:
    def slow_first(number: int, length: int) -> Answer:
        return even(2.0 if number < 40 else 0.1, 0.01)(number, length)

    result = play(ScriptedTarget(slow_first), warmup_s=2.0, duration_s=10.0)
    assert result.summary.num_requests == 160
    assert len(result.records) == 200
    assert result.summary.latencies["ttft_s"].max == pytest.approx(0.1, abs=2 * TICK_S)
    # The answers to the warm-up's requests came in the window: the server worked for them then.
    assert result.summary.output_tokens_per_s > 20 * 10


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    times = [0, 100, 100, 700]
    requests = [
        TraceRequest(timestamp_ms=t, input_length=3, output_length=5, hash_ids=(t,)) for t in times
    ]
    write_trace(tmp_path / "t", requests)
    load = TraceReplay(path=tmp_path / "t", slowdown=3.0)
    result = play(ScriptedTarget(even(0.1, 0.1)), load=load)
    assert [r.sent_s for r in result.records] == pytest.approx([0, 0.3, 0.3, 2.1], abs=TICK_S)
    with pytest.raises(ConfigError, match="cannot be read"):
        play(ScriptedTarget(even(0.1, 0.1)), load=TraceReplay(path=tmp_path / "none"))


def test_goodput_counts_those_who_keep_all_limits() -> None:
    def script(number: int, length: int) -> Answer:
        answer = even(0.3 if number % 4 == 0 else 0.1, 0.2 if number % 4 == 1 else 0.02)(
            number, length
        )
        is_broken = number % 8 == 2
        return Answer(frames=answer.frames, error="UNAVAILABLE" if is_broken else "")

    slo = Slo.parse("ttft=0.2,tpot=0.05")
    result = play(ScriptedTarget(script), duration_s=20.0, slo=slo)
    assert result.summary.num_requests == 400
    assert result.summary.attainment == pytest.approx(150 / 400)
    # The answers end over the 20 seconds, and what the slowest takes longer than the fastest.
    assert result.summary.rate_span_s == pytest.approx(20.0, rel=0.1)
    assert result.summary.goodput_per_s == pytest.approx(150 / result.summary.rate_span_s)
    assert result.summary.requests_per_s == pytest.approx(350 / result.summary.rate_span_s)
    assert result.summary.errors == {"UNAVAILABLE": 50}


@pytest.mark.parametrize("rate_per_s", [5.0, 20.0])
def test_goodput_is_at_most_what_ends_and_that_at_most_what_is_asked(rate_per_s: float) -> None:
    """A server that can do ten per second and stood still in the warm-up: a backlog ends later."""
    target = ScriptedTarget(even(0.1, 0.0), stalls=[(0.5, 3.0)], one_at_a_time=True)
    result = play(
        target, load=OpenLoop(rate_per_s=rate_per_s, arrivals="constant"), warmup_s=3.0,
        duration_s=8.0, output_lengths=Lengths(1), slo=Slo.parse("ttft=60"),
    )  # fmt: skip
    summary = result.summary
    assert summary.goodput_per_s is not None
    assert summary.goodput_per_s <= summary.requests_per_s <= summary.asked_per_s
    assert summary.asked_per_s == pytest.approx(rate_per_s, rel=0.05)
    assert summary.requests_per_s == pytest.approx(min(rate_per_s, 10.0), rel=0.05)
    # All of them were good ones in the end.
    assert summary.goodput_per_s == summary.requests_per_s
    assert summary.attainment == 1.0


def test_turns_wait_for_their_answers_and_an_error_ends_a_conversation() -> None:
    def script(number: int, length: int) -> Answer:
        return Answer(frames=((0.4, 1),), error="UNAVAILABLE" if number == 1 else "")

    load = OpenLoop(rate_per_s=2.0, arrivals="constant")
    result = play(ScriptedTarget(script), load=load, turns=Lengths(3), num_requests=9,
                  output_lengths=Lengths(1))  # fmt: skip
    sent = [(r.planned.index, round(r.sent_s, 1)) for r in result.records]
    # The second to be sent is the first conversation's second turn, which has no third one then.
    assert sorted(sent) == [
        (0, 0.0), (1, 0.4), (3, 0.5), (4, 0.9), (5, 1.3), (6, 1.0), (7, 1.4), (8, 1.8),
    ]  # fmt: skip
    assert [r.planned.turn for r in result.records if r.planned.index >= 6] == [0, 1, 2]
    users = play(ScriptedTarget(script), load=ClosedLoop(concurrency=1), turns=Lengths(2),
                 turn_pause_s=1e-9, num_requests=6, output_lengths=Lengths(1))  # fmt: skip
    assert [r.planned.index for r in users.records] == [0, 1, 2, 3, 4, 5]
    assert users.records[1].outcome is Outcome.ERROR


def test_cancels_reach_the_server_and_are_no_errors() -> None:
    target = ScriptedTarget(even(0.1, 0.02))
    result = play(target, cancel_rate=0.3, duration_s=10.0, output_lengths=Lengths(30))
    summary = result.summary
    assert target.num_given_up == summary.num_cancelled > 30
    assert summary.num_ok + summary.num_cancelled == summary.num_requests == 200
    assert summary.errors == {}
    assert summary.latencies["ttft_s"].count == 200
    assert summary.latencies["e2e_s"].count == summary.num_ok
    for record in result.records:
        if record.outcome is Outcome.CANCELLED:
            assert record.num_tokens == record.planned.cancel_after_tokens


def test_errors_by_kind_and_tokens_that_do_not_add_up() -> None:
    def script(number: int, length: int) -> Answer:
        frames = even(0.05, 0.01)(number, length).frames
        kinds = ["", "RESOURCE_EXHAUSTED", "HTTP_503", "", ""]
        if number % 5 == 3:
            return Answer(frames=frames, says_tokens=length + 1)
        return Answer(frames=((99.0, 1),) if number == 4 else frames, error=kinds[number % 5])

    result = play(ScriptedTarget(script), num_requests=50, timeout_s=5.0)
    assert result.summary.errors == {"RESOURCE_EXHAUSTED": 10, "HTTP_503": 10, "TIMEOUT": 1}
    assert result.summary.error_examples["RESOURCE_EXHAUSTED"] == "as scripted"
    assert result.summary.tokens.num_checked == 29
    assert result.summary.tokens.num_miscounted == 10


def test_what_has_no_answer_in_the_end_is_given_up_and_said() -> None:
    def script(number: int, length: int) -> Answer:
        return even(9e9 if number % 2 else 0.1, 0.01)(number, length)

    for load in (CONSTANT, ClosedLoop(concurrency=5)):
        target = ScriptedTarget(script)
        result = play(target, load=load, duration_s=2.0, drain_timeout_s=1.0)
        assert result.elapsed_s == pytest.approx(3.0, abs=0.06)
        assert result.summary.errors == {"UNFINISHED": target.num_calls // 2}
        assert not result.was_stopped


def test_a_run_can_be_stopped() -> None:
    result = play(ScriptedTarget(even(0.1, 0.1)), duration_s=60.0, stop_after_s=3.0)
    assert result.was_stopped
    assert result.elapsed_s == pytest.approx(3.0, abs=0.01)
    assert result.summary.num_ok == pytest.approx(40, abs=2)
    # The client has given up what it waited for, and blames nobody.
    assert result.summary.errors == {}
    assert result.summary.num_cancelled == len(result.records) - result.summary.num_ok > 0


def test_a_bug_of_ours_is_no_error_of_the_server() -> None:
    def script(number: int, length: int) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(ScriptedTarget(script), duration_s=60.0)


def test_progress_is_a_line_that_a_terminal_has_room_for() -> None:
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    plan = LoadPlan(
        load=CONSTANT, input_lengths=Lengths(4), output_lengths=Lengths(10), warmup_s=2.0,
        duration_s=5.0,
    )  # fmt: skip
    player = Player(plan, ScriptedTarget(even(1.0, 0.1)), now=clock)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    showing = loop.create_task(show_progress(plan, player, console))
    playing = loop.create_task(player.play(asyncio.Event()))
    lines = []
    while not playing.done():
        loop.run_until_idle()
        clock.advance(TICK_S)
        lines.append(progress_line(plan, player, 190.0))
    showing.cancel()
    loop.run_until_idle()
    loop.close()
    assert max(map(len, lines)) <= 80
    assert lines[3990].startswith("4 of 5 s measuring: 80 sent, 38 open, 0 failed, ")
    phases = dict.fromkeys(line.partition(":")[0].split()[-1] for line in lines)
    assert list(phases) == ["warm-up", "measuring", "draining"]
    assert re.match(r"5 s and \d+ s draining: 100 sent", lines[-1]), lines[-1]
    assert isinstance(console.file, io.StringIO)
    assert "4 of 5 s measuring: 80 sent" in console.file.getvalue()


@pytest.mark.parametrize("cancel_rate", [0.0, 0.5])
def test_a_run_makes_no_garbage_that_needs_a_collector(cancel_rate: float) -> None:
    """Garbage collection is off while times are taken, so garbage must not grow with requests."""
    left = []
    gc.disable()
    try:
        for num_requests in (20, 200):
            target = ScriptedTarget(even(0.01, 0.001))
            play(target, cancel_rate=cancel_rate, num_requests=num_requests)
            assert not gc.isenabled()  # it is left as it was found
            left.append(gc.collect())
    finally:
        gc.enable()
    assert left[1] < left[0] + 20, left
