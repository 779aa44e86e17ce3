"""Unit tests of the span exporter: exported spans, and spans that no collector takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import pytest

from baton.api.errors import ConfigError
from baton.telemetry.export.span_export import MAX_WAITING, SpanExporter
from baton.telemetry.spans import Span, SpanKind, TraceContext
from tests.fakes.outside.otlp_collector import OtlpCollector
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium

ROOT = TraceContext(bytes(range(16)), bytes(range(8)), True, "vendor=1")
OTHER = TraceContext(bytes(range(16)), bytes(8))
SPAN = Span(
    name="work",
    context=ROOT,
    parent_id=b"\1" * 8,
    begin_s=1.5,
    end_s=2.25,
    kind=SpanKind.SERVER,
    attributes={"text": "a", "yes": True, "one": 1, "half": 0.5, "several": ("b", "c")},
    links=((OTHER, "retry of"),),
    events=(("first token", 2.0),),
    error="it broke",
)
ZERO_NS = 1_700_000_000 * 10**9


def test_a_span_arrives_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with OtlpCollector() as collector:
        exporter = SpanExporter(collector.endpoint, "baton-x", {"service.instance.id": "x-1"})
        exporter.take([SPAN], ZERO_NS)
        exporter.close()
    (span,) = collector.spans
    assert (span.trace_id, span.span_id, span.parent_id) == (
        ROOT.trace_id.hex(), ROOT.span_id.hex(), "01" * 8,
    )  # fmt: skip
    assert (span.name, span.service, span.instance) == ("work", "baton-x", "x-1")
    assert (span.begin_s - ZERO_NS / 1e9, span.length_s) == pytest.approx((1.5, 0.75), abs=1e-6)
    assert span.attributes == {
        "text": "a", "yes": True, "one": 1, "half": 0.5, "several": ["b", "c"],
    }  # fmt: skip
    assert span.links == [(OTHER.span_id.hex(), "retry of")]
    assert span.events == {"first token": ZERO_NS / 1e9 + 2.0}
    assert (span.error, span.trace_state) == ("it broke", "vendor=1")
    assert span.resource["deployment.environment"] == "test"
    assert (exporter.num_exported, exporter.num_dropped) == (1, 0)


def test_the_environment_s_name_of_the_service_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with OtlpCollector() as collector:
        exporter = SpanExporter(collector.endpoint, "baton-x", {"service.instance.id": "x-1"})
        exporter.take([SPAN], ZERO_NS)
        exporter.close()
    assert collector.spans[0].service == "mine"


def test_nobody_waits_for_a_collector_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporter = SpanExporter("http://127.0.0.1:1", "baton-x", {})
    for _ in range(MAX_WAITING + 10):
        exporter.take([SPAN], ZERO_NS)
    wait_until(lambda: exporter.num_dropped >= 10, "spans that there is no room for")
    assert exporter.num_exported == 0
    exporter.close()
    assert not exporter._thread.is_alive()


class _Nonsense(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # no class at run time has any
    """A collector with nonsense for answers."""

    def __init__(self) -> None:
        self.num_calls = 0

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _refuse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_calls += 1
        context.set_trailing_metadata((("google.rpc.retryinfo-bin", b"\xff\xff\xff"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        raise AssertionError("abort raises")


def test_a_collector_that_answers_nonsense_does_not_end_the_exporter() -> None:
    server, nonsense = grpc.server(ThreadPoolExecutor(1)), _Nonsense()
    server.add_generic_rpc_handlers((nonsense,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    exporter = SpanExporter(f"http://127.0.0.1:{port}", "baton-x", {})
    for number in (1, 2):
        exporter.take([SPAN], ZERO_NS)
        wait_until(lambda n=number: exporter.num_dropped == n, "spans that were refused")  # type: ignore[misc]
    assert nonsense.num_calls == 2
    exporter.close()
    server.stop(0).wait()


def test_spans_that_cannot_be_laid_out_do_not_end_the_exporter() -> None:
    with OtlpCollector() as collector:
        exporter = SpanExporter(collector.endpoint, "baton-x", {})
        exporter.take([msgspec.structs.replace(SPAN, attributes={"text": "\ud800"})], ZERO_NS)
        wait_until(lambda: exporter.num_dropped == 1, "a span that cannot be sent")
        exporter.take([SPAN], ZERO_NS)
        exporter.close()
    assert [span.name for span in collector.spans] == ["work"]


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace_endpoint: must be http:// or https://"):
        SpanExporter("localhost:4317", "baton-x", {})
