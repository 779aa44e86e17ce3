"""TraceOptions: where traces are sent, and how many requests are traced."""

from __future__ import annotations

from dataclasses import dataclass

from baton.options import check_limits, option


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of a program's traces; raises ConfigError for invalid values."""

    trace_endpoint: str = option(
        "",
        variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="URL of an OpenTelemetry collector (OTLP over gRPC), such as http://127.0.0.1:4317; "
        "empty: no traces. The OTEL_EXPORTER_OTLP_* variables set its certificates, headers and "
        "timeout. Needs: pip install 'baton-serve[otel]'.",
    )
    trace_ratio: float = option(
        1.0,
        least=0,
        most=1,
        help="Share of requests to trace, among those whose caller has no trace; the sampling in a "
        "caller's trace decides about its own requests.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
