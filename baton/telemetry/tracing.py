"""Tracing: decides which requests are traced, and passes on their spans. Costs nothing when off."""

from __future__ import annotations

from baton.telemetry.export.span_export import SpanExporter
from baton.telemetry.spans import SpanSink, TraceContext, parse_traceparent, random_id
from baton.telemetry.trace_options import TraceOptions


class Tracing:
    """The tracing of one process.

    Args:
        options: where to send traces; None: tracing is off.
        service: name of this program in traces.
        resource: further attributes of all spans.
        sink: function that takes the spans instead of an exporter.

    Attributes:
        sink: function that takes finished spans; None: tracing is off.
    """

    def __init__(
        self,
        options: TraceOptions | None = None,
        *,
        service: str = "baton",
        resource: dict[str, str] | None = None,
        sink: SpanSink | None = None,
    ) -> None:
        options = options or TraceOptions()
        self._exporter: SpanExporter | None = None
        if sink is None and options.trace_endpoint:
            self._exporter = SpanExporter(options.trace_endpoint, service, resource or {})
            sink = self._exporter.take
        self.sink = sink
        # OpenTelemetry's TraceIdRatioBased decides in the same way, by the trace id, so programs
        # with equal ratios sample the same traces.
        self._bound = round(options.trace_ratio * 2**64)

    def begin(self, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Return the parent context of a request's first span; None if the request is not traced.

        Args:
            traceparent, tracestate: the caller's W3C headers; empty: not sent.
        """
        if self.sink is None:
            return None
        parent = parse_traceparent(traceparent, tracestate)
        if parent is not None:
            return parent if parent.is_sampled else None
        trace_id = random_id(16)
        return TraceContext(trace_id) if int.from_bytes(trace_id[8:], "big") < self._bound else None

    def counts(self) -> tuple[int, int]:
        """Return the numbers of exported and of dropped spans."""
        exporter = self._exporter
        return (0, 0) if exporter is None else (exporter.num_exported, exporter.num_dropped)

    def close(self) -> None:
        """Send the queued spans; blocks for some seconds at most."""
        if self._exporter is not None:
            self._exporter.close()


NO_TRACING = Tracing()
