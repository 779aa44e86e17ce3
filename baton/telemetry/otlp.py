"""Plain spans to OTLP's messages. Needs OpenTelemetry: imported only where spans are exported."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from baton.telemetry.spans import Attribute, Span
from baton.version import __version__

_SAMPLED = 1


def make_request(
    data: Sequence[tuple[Span, int]], resource: dict[str, str]
) -> ExportTraceServiceRequest:
    """One message of many spans.

    Args:
        data: spans, each with the UNIX time at which its clock showed 0, in nanoseconds.
        resource: attributes of the process that they are of.
    """
    scope = ScopeSpans(
        scope=InstrumentationScope(name="baton", version=__version__),
        spans=[_to_otlp(span, zero_ns) for span, zero_ns in data],
    )
    whose = Resource(attributes=[_key_value(key, value) for key, value in resource.items()])
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=whose, scope_spans=[scope])]
    )


def _to_otlp(span: Span, zero_ns: int) -> OtlpSpan:
    context = span.context
    made = OtlpSpan(
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_span_id=span.parent_id,
        name=span.name,
        kind=span.kind,  # type: ignore[arg-type]  # the same numbers
        start_time_unix_nano=zero_ns + round(span.begin_s * 1e9),
        end_time_unix_nano=zero_ns + round(span.end_s * 1e9),
        attributes=[_key_value(key, value) for key, value in span.attributes.items()],
        flags=_SAMPLED,
    )
    if context.state:
        made.trace_state = context.state
    for linked, how in span.links:
        made.links.add(
            trace_id=linked.trace_id,
            span_id=linked.span_id,
            attributes=[_key_value("baton.link", how)],
            flags=_SAMPLED,
        )
    for name, at_s in span.events:
        made.events.add(name=name, time_unix_nano=zero_ns + round(at_s * 1e9))
    if span.error:
        made.status.CopyFrom(Status(message=span.error, code=Status.STATUS_CODE_ERROR))
    return made


@functools.lru_cache(4096, typed=True)  # most are said again and again
def _key_value(key: str, value: Attribute) -> KeyValue:
    if isinstance(value, bool):
        return KeyValue(key=key, value=AnyValue(bool_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    if isinstance(value, float):
        return KeyValue(key=key, value=AnyValue(double_value=value))
    if isinstance(value, tuple):
        texts = ArrayValue(values=[AnyValue(string_value=text) for text in value])
        return KeyValue(key=key, value=AnyValue(array_value=texts))
    return KeyValue(key=key, value=AnyValue(string_value=value))
