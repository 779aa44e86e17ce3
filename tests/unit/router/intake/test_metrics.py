"""Unit tests of the router's metrics: every request is counted once, however it ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from baton.api.errors import BatonError, InvalidRequestError, NodeUnavailableError, OverloadedError
from baton.api.outputs import FinishReason, TextDelta
from baton.link.words import NodeBeat, NodeRole, PeerReport
from baton.serving.connection_limits import ConnectionCounts
from router.calls.recovery.suspects import Suspects
from router.fleet.load.forecast import PrefillForecast
from router.gate.admission import Admission, make_admission
from router.gate.admission_options import AdmissionOptions
from router.gate.capacity import Capacity
from router.gate.overload import Overload
from router.intake.metrics import RouterMetrics
from tests.fakes.router.nodes import (
    HandNode,
    join_pair,
    make_pool,
    make_receipt,
    make_registration,
)

DOCUMENT = Path(__file__).parents[4] / "docs" / "openai_api.md"
RECEIPT = make_receipt(num_prompt_tokens=10, ttft_s=0.2, total_s=0.6, num_attempts=2)


def values(metrics: RouterMetrics) -> dict[str, float]:
    lines = (line for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    pairs = (line.rpartition(" ") for line in lines)
    return {name.removeprefix("baton_router_"): float(value) for name, _, value in pairs}


def test_every_metric_is_described_in_the_document() -> None:
    pool = make_pool()
    admission = make_admission(pool)
    metrics = RouterMetrics(pool, admission, Overload(), Suspects(pool))
    metrics.show_connections(ConnectionCounts())
    text = metrics.text().decode()
    exported = set(re.findall(r"^# TYPE (baton_\S+)", text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(baton_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert {name for name in exported if not name.endswith("_created")} == documented
    assert "# TYPE process_open_fds gauge" in text


def test_a_finished_request_is_counted_with_its_tokens_and_times() -> None:
    metrics = RouterMetrics()
    with metrics.running() as record:
        assert values(metrics)["requests_open"] == 1
        record.on_last_delta(TextDelta("a", 4, (1,), "x", FinishReason.LENGTH, RECEIPT))
    found = values(metrics)
    assert found['requests_total{outcome="length"}'] == 1
    assert found["requests_open"] == 0
    assert (found["prompt_tokens_total"], found["output_tokens_total"]) == (10, 5)
    assert found["attempts_total"] == 2
    assert found["time_to_first_token_seconds_sum"] == 0.2
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.1)
    assert found["request_seconds_count"] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NodeUnavailableError("x"), "unavailable"),
        (BatonError("x"), "internal"),
        (KeyError("x"), "internal"),
        (GeneratorExit(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_a_request_that_fails_is_counted_by_how(error: BaseException, outcome: str) -> None:
    metrics = RouterMetrics()
    with pytest.raises(type(error)), metrics.running():
        raise error
    found = values(metrics)
    assert found[f'requests_total{{outcome="{outcome}"}}'] == 1
    assert found["requests_open"] == 0
    assert found["time_to_first_token_seconds_count"] == 0


def test_a_finished_request_that_is_not_read_behind_its_end_is_finished() -> None:
    metrics = RouterMetrics()
    running = metrics.running()
    running.__enter__().on_last_delta(TextDelta("a", 4, (1,), "x", FinishReason.STOP, RECEIPT))
    assert not running.__exit__(GeneratorExit, GeneratorExit(), None)  # it goes on
    assert values(metrics)['requests_total{outcome="stop"}'] == 1


def test_a_refused_request_is_counted() -> None:
    metrics = RouterMetrics()
    with pytest.raises(InvalidRequestError), metrics.accepting():
        raise InvalidRequestError("n", "is wrong")
    assert values(metrics)['requests_total{outcome="invalid_argument"}'] == 1


def test_nodes_are_counted_by_role_and_state_as_of_now() -> None:
    pool = make_pool()
    metrics = RouterMetrics(pool)
    join_pair(pool)
    silent = HandNode(pool, make_registration("d1", NodeRole.DECODE))
    found = values(metrics)
    assert found['nodes{role="prefill",state="ready"}'] == 1
    assert found['nodes{role="decode",state="ready"}'] == 1
    assert found['nodes{role="decode",state="joined"}'] == 1
    for _ in range(10):
        pool.count_missed_beats()
    assert silent.engine_id not in [node.engine_id for node in pool.nodes]
    found = values(metrics)
    assert found['nodes{role="decode",state="lost"}'] == 2
    assert found['nodes{role="decode",state="ready"}'] == 0


def test_forecasts_of_prompts_are_counted_by_how_near_they_were() -> None:
    pool = make_pool()
    for compute_s, wait_s in ((0.09, 0.05), (0.3, 0.1)):
        forecast = PrefillForecast(10, 0.0, 0.1, 0.0, wait_s, compute_s)
        pool.forecasts.alone.note(forecast)
    found = values(RouterMetrics(pool))
    name = "prefill_forecast_ratio"
    assert found[f'{name}_count{{of="compute",place="alone"}}'] == 2
    assert found[f'{name}_count{{of="compute",place="pair"}}'] == 0
    total = found[f'{name}_sum{{of="compute",place="alone"}}']
    assert total == pytest.approx(0.1 / 0.09 + 0.1 / 0.3)
    assert found[f'{name}_bucket{{le="0.5",of="compute",place="alone"}}'] == 1
    assert found[f'{name}_bucket{{le="0.5",of="first_token",place="alone"}}'] == 1
    assert found[f'{name}_bucket{{le="0.8",of="first_token",place="alone"}}'] == 2


def test_pairs_that_are_down_are_counted_whichever_end_says_so() -> None:
    pool = make_pool()
    metrics = RouterMetrics(pool)
    p0, d0 = join_pair(pool)
    d1 = HandNode(pool, make_registration("d1", NodeRole.DECODE))
    HandNode(pool, make_registration("d2", NodeRole.DECODE, differs={"dtype": "float16"}))
    found = values(metrics)
    assert (found['pairs{state="connected"}'], found['pairs{state="down"}']) == (1, 0)
    p0.reach(d1, connected=False, problem="no answer in 10 s")
    d0.reach(p0, connected=False, problem="no beat")
    d1.reach(p0, connected=False, problem="no beat")
    found = values(metrics)
    assert (found['pairs{state="connected"}'], found['pairs{state="down"}']) == (0, 2)
    for end in (d0, d1):
        p0.reach(end)
        end.reach(p0)
    found = values(metrics)
    assert (found['pairs{state="connected"}'], found['pairs{state="down"}']) == (2, 0)


def test_a_node_that_stands_still_takes_its_pairs_down() -> None:
    """No alert said so: a silent node is lost, and then nobody says anything about its pairs."""
    pool = make_pool()
    metrics = RouterMetrics(pool)
    p0, d0 = join_pair(pool)
    d1 = HandNode(pool, make_registration("d1", NodeRole.DECODE))
    p0.reach(d1)
    for _ in range(10):
        for decode in (d0, d1):
            pool.on_event(decode.node, NodeBeat())
        pool.count_missed_beats()
    found = values(metrics)
    assert found['nodes{role="prefill",state="lost"}'] == 1
    assert (found['pairs{state="connected"}'], found['pairs{state="down"}']) == (0, 2)
    again = HandNode(pool, p0.node.registration)
    again.reach(d0)
    again.reach(d1)
    found = values(metrics)
    assert (found['pairs{state="connected"}'], found['pairs{state="down"}']) == (2, 0)


def test_a_node_that_failed_is_counted_as_ejected() -> None:
    pool = make_pool()
    join_pair(pool, 0)
    (p1, d1) = join_pair(pool, 1)
    p1.node.health.eject("ill")
    found = values(RouterMetrics(pool))
    assert found['nodes{role="prefill",state="ejected"}'] == 1
    assert found['nodes{role="prefill",state="ready"}'] == 1
    assert d1.engine_id in [node.engine_id for node in pool.nodes]


def test_refusals_are_counted_by_reason() -> None:
    admission = Admission(
        Capacity(lambda: make_pool().fleet), AdmissionOptions(max_open_requests=1)
    )

    async def fill() -> None:
        sizes = {"num_prompt_tokens": 1, "max_tokens": 1, "timeout_s": 1.0}
        async with admission.enter(**sizes):  # type: ignore[arg-type]
            with pytest.raises(OverloadedError):
                async with admission.enter(**sizes):  # type: ignore[arg-type]
                    pass

    asyncio.run(fill())
    found = values(RouterMetrics(admission=admission))
    assert found['requests_refused_total{reason="open_requests"}'] == 1
    assert found["requests_queued"] == 0


def test_of_very_many_pairs_the_slowest_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.intake.metrics.MAX_PAIRS", 2)
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", NodeRole.PREFILL))
    for name, rate in (("d0", 3e9), ("d1", 0.0), ("d2", 1e9), ("d3", 2e9)):
        decode = HandNode(pool, make_registration(name, NodeRole.DECODE))
        pool.on_event(prefill.node, PeerReport(decode.engine_id, True, "tcp", "", rate))
    told = {name: rate for name, rate in values(RouterMetrics(pool)).items() if "pair_" in name}
    assert [re.findall(r'decode_node="(\w+)"', name)[0] for name in told] == ["d2", "d3"]
    assert list(told.values()) == [1e9, 2e9]
