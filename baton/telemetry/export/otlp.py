"""Encode spans as OTLP messages. Imports OpenTelemetry, so only the exporter imports this module.

Ids and times are packed into protobuf's byte format directly. Names and attributes repeat often, so
they are encoded once and cached. The encoded parts, joined, are a valid message. An object per
span would take four times as long, and slow down a router.
"""

from __future__ import annotations

import functools
import struct
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

# Fixed-size parts of a span, tags included: trace_id and span_id; kind, begin and end.
_IDS = struct.Struct("<2s16s2s8s")
_TIMES = struct.Struct("<BBBQBQ")
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_KIND, _BEGIN, _END = 0x30, 0x39, 0x41
_FLAGS = OtlpSpan(flags=1).SerializeToString()  # says that the trace is sampled
_SPAN = b"\x12"  # tag of a span in ScopeSpans
_KEPT_CHARS = 64  # longer texts are not cached, because they rarely repeat


def make_request(
    data: Sequence[tuple[Span, int]], resource: dict[str, str]
) -> ExportTraceServiceRequest:
    """Return one message with many spans.

    Args:
        data: spans, each with the UNIX time in nanoseconds at which the span's clock showed 0.
        resource: attributes of the process that made the spans.
    """
    parts = [_scope()]
    for span, zero_ns in data:
        encoded = _encode(span, zero_ns)
        parts += (_SPAN, _varint(len(encoded)), encoded)
    whose = Resource(attributes=[_key_value(key, value) for key, value in resource.items()])
    scope_spans = ScopeSpans.FromString(b"".join(parts))
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=whose, scope_spans=[scope_spans])]
    )


def _encode(span: Span, zero_ns: int) -> bytes:
    context = span.context
    begin_ns, end_ns = zero_ns + round(span.begin_s * 1e9), zero_ns + round(span.end_s * 1e9)
    parts = [
        _IDS.pack(_TRACE_ID, context.trace_id, _SPAN_ID, context.span_id),
        _TIMES.pack(_KIND, span.kind, _BEGIN, begin_ns, _END, end_ns),
        _FLAGS,
        _name(span.name),
    ]
    if span.parent_id:
        parts += (_PARENT_ID, span.parent_id)
    for key, value in span.attributes.items():
        is_new = isinstance(value, float) or (isinstance(value, str) and len(value) > _KEPT_CHARS)
        parts.append(_make_attribute(key, value) if is_new else _attribute(key, value))
    if context.state or span.links or span.events or span.error:
        parts.append(_rest(span, zero_ns).SerializeToString())
    return b"".join(parts)


def _rest(span: Span, zero_ns: int) -> OtlpSpan:
    """Return the encoded fields that only few spans have."""
    made = OtlpSpan(trace_state=span.context.state)
    for linked, how in span.links:
        made.links.add(
            trace_id=linked.trace_id,
            span_id=linked.span_id,
            attributes=[_key_value("baton.link", how)],
            flags=1,
        )
    for name, at_s in span.events:
        made.events.add(name=name, time_unix_nano=zero_ns + round(at_s * 1e9))
    if span.error:
        made.status.CopyFrom(Status(message=span.error, code=Status.STATUS_CODE_ERROR))
    return made


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@functools.cache
def _scope() -> bytes:
    scope = InstrumentationScope(name="baton", version=__version__)
    return ScopeSpans(scope=scope).SerializeToString()


@functools.lru_cache(256)
def _name(name: str) -> bytes:
    return OtlpSpan(name=name).SerializeToString()


def _make_attribute(key: str, value: Attribute) -> bytes:
    return OtlpSpan(attributes=[_key_value(key, value)]).SerializeToString()


_attribute = functools.lru_cache(8192, typed=True)(_make_attribute)


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
