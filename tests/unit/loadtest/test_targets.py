"""Targets against small real servers that note what they really did."""

from __future__ import annotations

import asyncio
import json
import math
import random
from fractions import Fraction
from typing import Any

import pytest

from baton.api.errors import ConfigError
from loadtest.load.generate import Lengths
from loadtest.load.record import Outcome
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report.distribution import PER_MILLE, Distribution
from loadtest.run import Run, RunResult
from loadtest.targets import TARGETS, open_target
from loadtest.targets.base import Frame, TargetError, TargetOptions, Usage
from loadtest.targets.openai_http import EventReader
from tests.fakes.outside.load_servers import (
    NUM_CACHED,
    SERVERS,
    HttpScript,
    ScriptedServer,
    ServedCall,
)
from tests.fakes.outside.load_targets import Answer, Script, even

NUM_REQUESTS = 40


def play(
    server: str, script: Script, options: dict[str, Any] | None = None, **plan: Any
) -> tuple[RunResult, ScriptedServer, float]:
    """The result, the server, and when the run began, on `time.perf_counter`."""
    defaults: dict[str, Any] = {
        "load": OpenLoop(rate_per_s=40.0),
        "input_lengths": Lengths(20),
        "output_lengths": Lengths(13),
        "num_requests": NUM_REQUESTS,
    }

    async def scene() -> tuple[RunResult, ScriptedServer, float]:
        async with SERVERS[server](script) as (serving, url):
            target = await open_target(TargetOptions(url=url, **options or {}))
            try:
                run = Run(LoadPlan(**defaults | plan), target)
                result = await run.execute(asyncio.Event())
            finally:
                await target.close()
            for _ in range(200):  # until the server has seen who has gone
                if sum(call.was_given_up for call in serving.calls) >= result.summary.num_cancelled:
                    break
                await asyncio.sleep(0.01)
            return result, serving, run.player.clock.began_at

    return asyncio.run(scene())


def assert_percentiles(found: Distribution, values: list[float], allowance_s: float) -> None:
    """Within 2 %, or the time by which this very process was late meanwhile."""
    in_order = sorted(values)
    assert found.count == len(in_order)
    for name, per_mille in PER_MILLE.items():
        rank = math.ceil(Fraction(per_mille, 1000) * len(in_order))
        assert getattr(found, name) == pytest.approx(
            in_order[rank - 1], rel=0.02, abs=allowance_s
        ), name


def random_answers(seed: int, sizes: list[int]) -> Script:
    chance = random.Random(seed)
    answers = [
        Answer(
            frames=tuple(
                (chance.uniform(0.3, 1.2) if k == 0 else chance.uniform(0.1, 0.4), size)
                for k, size in enumerate(sizes)
            )
        )
        for _ in range(NUM_REQUESTS)
    ]
    return lambda number, length: answers[number]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("server", "options"),
    [
        pytest.param("grpc", {}, marks=pytest.mark.thorough),
        ("grpc", {"connections": 3}),
        pytest.param("http", {"count_tokens_by": "logprobs"}, marks=pytest.mark.thorough),
        pytest.param("http", {"count_tokens_by": "continuous-usage"}, marks=pytest.mark.thorough),
        ("http", {}),
        ("http that refuses", {}),
    ],
)
def test_what_is_measured_is_what_the_server_did(
    server: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_estimated = server == "http that refuses"
    if is_estimated:
        server = "http"
        monkeypatch.setattr(HttpScript, "takes_continuous_usage", False)
    result, serving, began_at = play(server, random_answers(3, [1, 1, 4, 2, 5]), options)
    calls: list[tuple[float, ServedCall]] = []
    for record in result.records:
        prompt = record.planned.prompt.make(1000)
        assert isinstance(prompt, list)
        call = serving.call_of(prompt)
        calls.append((began_at + record.scheduled_s, call))
    assert result.summary.lag.loop is not None
    late_s = 0.002 + 2 * result.summary.lag.loop.max
    found = result.summary.latencies
    gaps = [
        (after - before, size)
        for _, call in calls
        for (before, _), (after, size) in zip(call.sent, call.sent[1:], strict=False)
    ]
    assert_percentiles(found["ttft_s"], [call.sent[0][0] - at for at, call in calls], late_s)
    assert_percentiles(found["e2e_s"], [call.sent[-1][0] - at for at, call in calls], late_s)
    assert_percentiles(found["frame_gap_s"], [gap for gap, _ in gaps], late_s)
    assert_percentiles(
        found["itl_s"], [gap / size for gap, size in gaps for _ in range(size)], late_s
    )
    assert_percentiles(
        found["tpot_s"], [(c.sent[-1][0] - c.sent[0][0]) / 12 for _, c in calls], late_s
    )
    tokens = result.summary.tokens
    assert tokens.num_checked == (0 if is_estimated else NUM_REQUESTS)
    assert tokens.num_estimated == (NUM_REQUESTS if is_estimated else 0)
    assert (tokens.num_miscounted, tokens.num_short) == (0, 0)
    num_cached = NUM_REQUESTS * (NUM_CACHED if server == "http" else 0)
    assert (result.summary.cache.num_cached_tokens, result.summary.cache.num_requests) == (
        num_cached, NUM_REQUESTS,
    )  # fmt: skip
    if server == "grpc":
        assert found["router_queue_s"].p50 == 0.25
        assert_percentiles(
            found["server_ttft_s"], [c.sent[0][0] - c.received_at for _, c in calls], 1e-6
        )


@pytest.mark.medium
@pytest.mark.parametrize("server", SERVERS)
def test_cancels_reach_the_server(server: str) -> None:
    result, serving, _ = play(server, even(0.05, 0.1), {}, cancel_rate=0.5)
    num_cancelled = result.summary.num_cancelled
    assert num_cancelled > 10
    assert result.summary.num_ok == NUM_REQUESTS - num_cancelled
    given_up = {call.prompt for call in serving.calls if call.was_given_up}
    assert given_up == {
        tuple(prompt)
        for record in result.records
        if record.outcome is Outcome.CANCELLED
        and isinstance(prompt := record.planned.prompt.make(1000), list)
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("server", "kinds"),
    [
        ("grpc", {"RESOURCE_EXHAUSTED": "RESOURCE_EXHAUSTED", "cut": "CUT_SHORT"}),
        ("http", {"429": "HTTP_429", "cut": "CUT_SHORT", "no room": "STREAM_ERROR"}),
    ],
)
def test_errors_by_kind(server: str, kinds: dict[str, str]) -> None:
    errors = ["", *kinds]

    def script(number: int, length: int) -> Answer:
        frames = even(0.02, 0.005)(number, length).frames
        return Answer(frames=frames, error=errors[number % len(errors)])

    result, _, _ = play(server, script, {}, num_requests=len(errors) * 5)
    assert result.summary.errors == dict.fromkeys(kinds.values(), 5)
    assert result.summary.num_ok == 5


@pytest.mark.medium
@pytest.mark.parametrize(
    ("server", "options"), [("grpc", {}), ("http", {"count_tokens_by": "logprobs"})]
)
def test_a_server_that_says_other_numbers_is_noticed(server: str, options: dict[str, Any]) -> None:
    def script(number: int, length: int) -> Answer:
        frames = even(0.02, 0.005)(number, length).frames
        return Answer(frames=frames, says_tokens=length - 1 if number < 3 else None)

    result, _, _ = play(server, script, options, num_requests=10)
    assert result.summary.tokens.num_checked == 10
    assert result.summary.tokens.num_miscounted == 3


@pytest.mark.medium
@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "http://127.0.0.1:1/v1"])
def test_nobody_there_is_said_before_the_run(url: str) -> None:
    with pytest.raises(TargetError, match=r"does not answer"):
        asyncio.run(open_target(TargetOptions(url=url)))


@pytest.mark.parametrize(
    "options",
    [
        {"url": "127.0.0.1:1"},
        {"url": "ftp://127.0.0.1:1"},
        {"url": "grpc://127.0.0.1"},
        {"url": "grpc://127.0.0.1:1", "connections": 0},
        {"url": "http://127.0.0.1:1/v1", "count_tokens_by": "eye"},
    ],
)
def test_targets_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(open_target(TargetOptions(**options)))


def test_a_key_is_never_shown() -> None:
    assert "secret" not in repr(TargetOptions(url="grpc://x:1", api_key="secret"))


def test_every_target_has_a_scripted_server() -> None:
    assert set(TARGETS.names()) - {"https"} == set(SERVERS)


def test_events_of_one_read_are_one_frame_wherever_reads_end() -> None:
    events = (
        b': a comment\r\n\r\ndata: {"choices": [{"text": "a", "token_ids": [1]}]}\r\n\r\n'
        b'data:{"choices": [{"text": "bc", "token_ids": [2, 3]}]}\n\n'
        b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
        b"data: [DONE]\n\n"
    )
    whole = EventReader()
    assert whole.read(events) == Frame(3, 3, "stop", Usage(9, 3))
    assert whole.is_finished
    for size in (1, 7, 60):
        reader = EventReader()
        frames = [reader.read(events[at : at + size]) for at in range(0, len(events), size)]
        assert sum((frame.num_tokens or 0) for frame in frames if frame is not None) == 3
        assert reader.is_finished


def test_a_usage_at_the_end_is_not_that_of_the_last_event() -> None:
    reader = EventReader()
    assert reader.read(b'data: {"choices": [{"text": "abc"}]}\n\n') == Frame(None, 3)
    last = b'data: {"choices": [{"text": "", "finish_reason": "length"}], "usage": '
    last += b'{"prompt_tokens": 2, "completion_tokens": 5}}\n\n'
    assert reader.read(last) == Frame(0, 0, "length", Usage(2, 5))


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "yes"},
        {"reasoning": "yes"},
        {"reasoning_content": "yes", "reasoning": "yes"},
        {"content": "", "reasoning": "yes"},
        {"content": None, "refusal": "yes"},
        {"reasoning": {"kind": "other"}, "content": "yes"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "yes"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "yes", "arguments": ""}}]},
    ],
)
def test_whatever_the_model_writes_is_a_token(delta: dict[str, Any]) -> None:
    reader = EventReader()
    event = json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
    assert reader.read(b"data: " + event + b"\n\n") == Frame(None, 3)


def test_what_is_no_event_is_an_error() -> None:
    with pytest.raises(TargetError, match="NOT_UNDERSTOOD"):
        EventReader().read(b"data: {nonsense\n\n")
