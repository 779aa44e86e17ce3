"""Tracing: which requests are traced, and where their spans go. Off, it costs a comparison."""

from __future__ import annotations

from baton.telemetry.export.span_export import SpanExporter
from baton.telemetry.spans import SpanSink
from baton.telemetry.trace_context import TraceContext, parse_traceparent, random_id
from baton.telemetry.trace_options import TraceOptions


class Tracing:
    """Of one process.

    Args:
        options: where traces go; the usual ones (nowhere) if not given.
        service: name of this program in traces.
        resource: what else is true of all its spans.
        sink: takes spans in place of an exporter.

    Attributes:
        sink: takes spans; None: nothing is traced.
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
        # As OpenTelemetry's TraceIdRatioBased: all who sample by ratio keep the same traces.
        self._bound = round(options.trace_ratio * 2**64)

    def begin(self, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Decide on a request: the context that its first span is part of; None: not traced.

        Args:
            traceparent, tracestate: W3C's headers, as its caller sent them; empty: none.
        """
        if self.sink is None:
            return None
        parent = parse_traceparent(traceparent, tracestate)
        if parent is not None:
            return parent if parent.is_sampled else None
        trace_id = random_id(16)
        return TraceContext(trace_id) if int.from_bytes(trace_id[8:], "big") < self._bound else None

    def counts(self) -> tuple[int, int]:
        """How many spans were exported and dropped."""
        exporter = self._exporter
        return (0, 0) if exporter is None else (exporter.num_exported, exporter.num_dropped)

    def close(self) -> None:
        """Send what waits; blocks for some seconds at most."""
        if self._exporter is not None:
            self._exporter.close()


NO_TRACING = Tracing()
