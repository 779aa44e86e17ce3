"""An OpenTelemetry collector: takes spans over gRPC, and keeps them as plain values."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="needs baton-serve[otel]")

from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)


@dataclass(frozen=True, slots=True)
class TakenSpan:
    """A span that arrived; ids in hexadecimal, times in UNIX seconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    resource: dict[str, Any]
    begin_s: float
    end_s: float
    attributes: dict[str, Any]
    links: list[tuple[str, str]]  # span id, how
    events: dict[str, float]
    error: str
    trace_state: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass
class Trace:
    """All spans of one trace."""

    spans: list[TakenSpan] = field(default_factory=list)

    def named(self, name: str) -> list[TakenSpan]:
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.begin_s)

    def one(self, name: str) -> TakenSpan:
        (span,) = self.named(name)
        return span

    def under(self, parent: TakenSpan, name: str) -> list[TakenSpan]:
        return [span for span in self.named(name) if span.parent_id == parent.span_id]

    def check_unbroken(self, parent_id: str = "") -> None:
        """Check that each span has its parent here or ``parent_id``, and ends after its begin."""
        ids = {span.span_id for span in self.spans}
        assert len(ids) == len(self.spans), "a span came twice"
        for span in self.spans:
            assert span.parent_id in ids or span.parent_id == parent_id, span
            assert span.end_s >= span.begin_s, span
            assert all(link in ids for link, _ in span.links), span


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that listens on loopback inside a ``with`` block.

    Attributes:
        endpoint: value for ``--trace-endpoint``.
        spans: spans in order of arrival.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[TakenSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(2))

    def __enter__(self) -> OtlpCollector:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait()

    def Export(self, request: Any, context: object) -> Any:  # gRPC's naming
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_taken(span, resource) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, Trace]:
        """Return the traces by trace id."""
        traces: dict[str, Trace] = defaultdict(Trace)
        for span in list(self.spans):
            traces[span.trace_id].spans.append(span)
        return dict(traces)


def _taken(span: Any, resource: dict[str, Any]) -> TakenSpan:
    return TakenSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=resource["service.name"],
        instance=resource.get("service.instance.id", ""),
        resource=resource,
        begin_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        links=[
            (link.span_id.hex(), _attributes(link.attributes)["baton.link"]) for link in span.links
        ],
        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
        error=span.status.message,
        trace_state=span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
