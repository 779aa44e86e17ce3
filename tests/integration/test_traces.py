"""Traces of real processes in a collector: whole, also under retries, kills and moves, and equal
to the receipts."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton import Client, SamplingParams
from baton.api.outputs import Receipt
from baton.deployment.local_deployment import LocalDeployment
from tests.fakes.outside.otlp_collector import OtlpCollector, TakenSpan, Trace
from tests.fakes.processes.deployments import READY_TIMEOUT_S, deployment_config, node_with
from tests.fakes.time.waiting import wait_until
from tests.integration.test_recovery import (
    LONG_PROMPT,
    SHORT_PROMPT,
    Stream,
    send,
)

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

PROMPT = [7 + (i * 31) % 4000 for i in range(600)]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NODE_ARGS = ["--num-blocks", "400", "--long-prefill-token-threshold", "128"]
WITHIN_S = 1e-3


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


def start(
    collector: OtlpCollector, num_prefill: int = 1, num_decode: int = 1, *router_args: str
) -> LocalDeployment:
    traced = ["--trace-endpoint", collector.endpoint, "--log-level", "debug"]
    return LocalDeployment(
        deployment_config(
            *traced,
            *NODE_ARGS,
            http=True,
            num_prefill=num_prefill,
            num_decode=num_decode,
            router_args=[*traced, "--served-model-name", "demo", *router_args],
        )
    )


def post(running: LocalDeployment, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "include_receipt": True,
        "ignore_eos": True,
        **fields,
    }
    request = urllib.request.Request(
        f"http://{running.config.http_listen}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read()) from error


def whole(collector: OtlpCollector, trace_id: str, *names: str) -> Trace:
    """The trace, once it has all spans of these names."""

    def has_all() -> bool:
        found = collector.traces().get(trace_id)
        return found is not None and all(found.named(name) for name in names)

    wait_until(has_all, "all spans", timeout_s=20)
    return collector.traces()[trace_id]


def assert_equal_to(receipt: dict[str, Any], trace: Trace, request: TakenSpan) -> None:
    """The spans say what the receipt says."""
    queued = ("router.accept", "router.queue", "router.place")
    queue_s = sum(trace.one(name).length_s for name in queued)
    assert queue_s == pytest.approx(receipt["router_queue_s"], abs=WITHIN_S)
    first_token_s = request.events["first token"] - request.begin_s
    assert first_token_s == pytest.approx(receipt["ttft_s"], abs=WITHIN_S)
    assert request.length_s == pytest.approx(receipt["total_s"], abs=WITHIN_S)
    for name, part, field in (
        ("prefill.queue", "prefill", "queue_s"),
        ("prefill.compute", "prefill", "prefill_s"),
        ("decode.parked", "decode", "parked_s"),
        ("decode.first_step", "decode", "first_step_s"),
    ):
        assert trace.one(name).length_s == pytest.approx(receipt[part][field], abs=WITHIN_S), name
    parts = msgspec.convert(receipt, Receipt).ttft_parts
    assert sum(parts.values()) == pytest.approx(receipt["ttft_s"])
    assert min(parts.values()) > 0, parts


def test_one_trace_over_three_processes_says_what_the_receipt_says(
    collector: OtlpCollector,
) -> None:
    with start(collector) as running:
        running.wait_ready(READY_TIMEOUT_S)
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
        answer = post(running, headers, max_tokens=20)
        trace = whole(collector, TRACE_ID, "prefill", "decode", "text_completion demo")
        request = trace.one("text_completion demo")
        assert request.parent_id == PARENT_ID
        trace.check_unbroken(PARENT_ID)
        assert {span.trace_state for span in trace.spans} == {"vendor=1"}
        assert {span.service for span in trace.spans} == {
            "baton-router", "baton-prefill", "baton-decode",
        }  # fmt: skip
        attempt = trace.one("router.attempt")
        assert trace.one("prefill").parent_id == trace.one("decode").parent_id == attempt.span_id
        (receipt,) = answer["baton"]["receipts"]
        assert_equal_to(receipt, trace, request)
        chunks = trace.under(trace.one("prefill.compute"), "prefill.chunk")
        assert len(chunks) == receipt["prefill"]["num_chunks"] > 1
        assert request.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
        assert request.attributes["gen_ai.usage.output_tokens"] == 20
        # Logs are found by the trace, and nobody's text is in any.
        post(running, headers, prompt="a wombat named Zanzibar", max_tokens=2)
        for name in ("router", "p0", "d0"):
            log = running.child(name).log.read_text(encoding="utf-8")
            assert f"trace_id={TRACE_ID}" in log, name
            assert "Zanzibar" not in log
            assert str(PROMPT[:3]).strip("[]") not in log
        # What its caller does not want traced is not.
        num_spans = len(collector.spans)
        post(running, {"traceparent": f"00-{TRACE_ID[::-1]}-{PARENT_ID}-00"}, max_tokens=2)
        with Client(running.config.listen) as client:  # of nobody's trace: one of its own
            client.generate(PROMPT, SamplingParams(max_tokens=2))
        wait_until(lambda: len(collector.traces()) == 2, "another trace", timeout_s=20)
        assert TRACE_ID[::-1] not in collector.traces()
        assert len(collector.spans) > num_spans


def test_a_trace_is_whole_though_its_prefill_node_is_killed(collector: OtlpCollector) -> None:
    with start(collector, 2, 1) as running:
        running.wait_ready(READY_TIMEOUT_S)
        with Client(running.config.listen) as client:
            stream = Stream(client, LONG_PROMPT)
            name = node_with(running, "p", lambda node: node.beat.num_running > 0)
            send(running, name, signal.SIGKILL)
            stream.end()
        check_retried(collector, "prefill", "decode")


def test_a_trace_is_whole_though_its_decode_node_is_killed(collector: OtlpCollector) -> None:
    with start(collector, 1, 2) as running:
        running.wait_ready(READY_TIMEOUT_S)
        with Client(running.config.listen) as client:
            stream = Stream(client, SHORT_PROMPT)
            wait_until(lambda: len(stream.deltas) > 5, "token 6")
            name = node_with(running, "d", lambda node: node.num_requests > 0)
            send(running, name, signal.SIGKILL)
            stream.end()
        check_retried(collector, "prefill", "decode")


def check_retried(collector: OtlpCollector, *names: str) -> None:
    """The one trace has two attempts, and of each what its nodes lived to tell."""

    def is_there() -> bool:
        traces = list(collector.traces().values())
        attempts = traces[0].named("router.attempt") if traces else []
        return len(attempts) == 2 and all(traces[0].under(attempts[1], name) for name in names)

    wait_until(is_there, "the second attempt's spans", timeout_s=30)
    (trace,) = collector.traces().values()
    trace.check_unbroken()
    first, second = trace.named("router.attempt")
    assert first.error
    assert second.links == [(first.span_id, "retry of")]
    assert first.end_s <= second.begin_s
    request = trace.one("text_completion demo")
    assert request.attributes["baton.attempts"] == 2
    assert not request.error
