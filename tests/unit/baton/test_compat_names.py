"""Unit tests of metrics under another engine's names: all names, with Baton's numbers."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.api.outputs import FinishReason, TextDelta
from baton.kv.residency import BlockResidency
from baton.link.words import NodeRole
from baton.telemetry.ledger import Ledger
from engine.core.metrics import STEP_TOKENS, EngineMetrics, PinCounts
from kvconnector.base import ConnectorMetrics, HandoffMetrics, TransferOutcome
from node_runtime.reports.collector import NodeCollector
from router.gate.admission import make_admission
from router.intake.metrics import RouterMetrics
from tests.fakes.router.nodes import make_pool
from tests.unit.router.intake.test_metrics import RECEIPT

# What vLLM's dashboards and the Gateway API Inference Extension ask for, but for prefixes.
OF_ROUTERS = {
    "time_to_first_token_seconds": 0.2,  # sums of histograms
    "inter_token_latency_seconds": 0.1,
    "time_per_output_token_seconds": 0.1,
    "request_time_per_output_token_seconds": 0.1,
    "e2e_request_latency_seconds": 0.6,
    "request_prompt_tokens": 10,
    "request_generation_tokens": 5,
    "request_max_num_generation_tokens": 5,
    "request_decode_time_seconds": 0.4,
}


def samples(text: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_a_router_tells_of_requests(prefix: str) -> None:
    pool = make_pool()
    metrics = RouterMetrics(pool, make_admission(pool))
    metrics.show_names_of("demo")
    with metrics.running() as record:
        record.on_last_delta(TextDelta("a", 4, (1,), "x", FinishReason.LENGTH, RECEIPT))
    found = samples(metrics.text().decode())
    for name, total in OF_ROUTERS.items():
        (one,) = found[f"{prefix}{name}_sum"]
        assert one.value == pytest.approx(total)
        assert one.labels == {"model_name": "demo", "engine": "0"}
        assert found[f"{prefix}{name}_bucket"][-1].labels["le"] == "+Inf"
        assert found[f"{prefix}{name}_count"][0].value == 1
    reasons = {
        s.labels["finished_reason"]: s.value for s in found[f"{prefix}request_success_total"]
    }
    assert reasons == {"stop": 0, "length": 1, "abort": 0}
    assert found[f"{prefix}prompt_tokens_total"][0].value == 10
    assert found[f"{prefix}generation_tokens_total"][0].value == 5
    assert found[f"{prefix}num_requests_waiting"][0].value == 0
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds"):
        assert found[f"{prefix}{name}_count"][0].value == 1


def test_without_the_option_there_are_only_our_names() -> None:
    text = RouterMetrics(make_pool()).text().decode()
    assert "vllm" not in text


class Source:
    def engine_metrics(self) -> EngineMetrics:
        values = dict.fromkeys(EngineMetrics.__dataclass_fields__, 0)
        own = {"blocks": 10, "blocks_free": 4, "requests_running": 3, "requests_waiting": 2}
        own |= {"requests_parked": 1, "preemptions_total": 7, "step_tokens_total": 99}
        steps: dict[str, object] = {
            "steps_by_tokens": (1,) * (len(STEP_TOKENS) + 1),
            "accepted_drafts_by_place": (),
            "requests_started_by_priority": {},
            "preemptions_by_priority": {},
            "residency": BlockResidency(),
            "pins": PinCounts(),
            "kv_files": None,
        }
        return EngineMetrics(**{**values, **own, **steps})  # type: ignore[arg-type]  # by name

    def handoff_metrics(self) -> HandoffMetrics:
        return HandoffMetrics(
            open={}, ended=dict.fromkeys(TransferOutcome, 0), num_quarantined_blocks=0
        )

    def connector_metrics(self) -> ConnectorMetrics:
        return ConnectorMetrics(pairs={}, peer_failures=0)

    def ledger(self) -> Future[Ledger]:
        return Future()


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_"])
def test_a_node_tells_of_its_engine(prefix: str) -> None:
    registry = CollectorRegistry()
    registry.register(
        NodeCollector(NodeRole.DECODE, "d0", Source(), ledger_timeout_s=0, vllm_model="demo")
    )
    found = samples(generate_latest(registry).decode())
    for name, value in {
        "num_requests_running": 3,
        "num_requests_waiting": 3,  # those whose KV is awaited, too
        "kv_cache_usage_perc": 0.6,
        "gpu_cache_usage_perc": 0.6,
        "num_preemptions_total": 7,
        "prefix_cache_queries_total": 0,
        "prefix_cache_hits_total": 0,
        "iteration_tokens_total_sum": 99,
        "iteration_tokens_total_count": len(STEP_TOKENS) + 1,
    }.items():
        (one,) = found[f"{prefix}{name}"]
        assert one.value == pytest.approx(value), name
        assert one.labels["model_name"] == "demo"
