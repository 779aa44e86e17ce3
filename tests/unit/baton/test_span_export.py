"""Unit tests of the exporter: what a collector gets, and what becomes of spans that it does not."""

from __future__ import annotations

import pytest

from baton.api.errors import ConfigError
from baton.telemetry.span_export import MAX_WAITING, SpanExporter
from baton.telemetry.spans import Span, SpanKind
from baton.telemetry.trace_context import TraceContext
from tests.fakes.otlp_collector import OtlpCollector
from tests.fakes.waiting import wait_until

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


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace_endpoint: must be http:// or https://"):
        SpanExporter("localhost:4317", "baton-x", {})
