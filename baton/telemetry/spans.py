"""Spans as plain values, and the context that joins several processes' spans into a trace.

A span is made when the work that it describes has ended, from times that are also in receipts. So
traces and receipts agree, and a request that is not traced costs nothing. Knows no exporter.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

import msgspec

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512  # W3C demands that states up to this length are forwarded

_PARENT = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL
)
_SAMPLED = 1

Attribute: TypeAlias = str | bool | int | float | tuple[str, ...]


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The ids of a trace and a span, by which other processes add child spans.

    Attributes:
        trace_id: id of the trace, 16 bytes.
        span_id: id of the span, 8 bytes; empty: the trace has no span yet, and its next span is the
            root.
        is_sampled: whether spans of this trace are kept.
        state: data of other tracing systems (``tracestate``), which is forwarded unchanged.
    """

    trace_id: bytes
    span_id: bytes = b""
    is_sampled: bool = True
    state: str = ""

    def child(self) -> TraceContext:
        """Return the context of a new child span."""
        return TraceContext(self.trace_id, random_id(8), self.is_sampled, self.state)

    @property
    def traceparent(self) -> str:
        """Value of W3C's header ``traceparent`` for calls that this span makes."""
        flags = _SAMPLED if self.is_sampled else 0
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{flags:02x}"


class SpanKind(IntEnum):
    """Kinds of spans, by the relation to the parent, with OpenTelemetry's numbers."""

    INTERNAL = 1  # work within one process
    SERVER = 2  # work for a caller in another process
    CLIENT = 3  # a call to another process


class Span(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One piece of work with its begin and end.

    Attributes:
        parent_id: id of the parent span; empty: no parent.
        begin_s, end_s: seconds by the clock of the code that made the span.
        links: related spans, each with the kind of relation.
        events: name and time of moments within the span.
        error: why the work failed; empty: it did not fail.
    """

    name: str
    context: TraceContext
    parent_id: bytes
    begin_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, Attribute] = {}
    links: tuple[tuple[TraceContext, str], ...] = ()
    events: tuple[tuple[str, float], ...] = ()
    error: str = ""


def child_span(
    name: str,
    parent: TraceContext,
    begin_s: float,
    end_s: float,
    attributes: Mapping[str, Attribute] = MappingProxyType({}),
) -> Span:
    """Make a span of work within one process, as a child of ``parent``."""
    return Span(
        name=name,
        context=parent.child(),
        parent_id=parent.span_id,
        begin_s=begin_s,
        end_s=end_s,
        attributes=attributes,
    )


def request_span(
    name: str,
    parent: TraceContext,
    request_id: str,
    begin_s: float,
    end_s: float,
    *,
    counts: Mapping[str, Attribute],
    error: str,
) -> Span:
    """Make a node's span of a router's request, as a child of ``parent``."""
    return Span(
        name=name,
        context=parent.child(),
        parent_id=parent.span_id,
        begin_s=begin_s,
        end_s=end_s,
        kind=SpanKind.SERVER,
        attributes={"baton.request_id": request_id, **counts},
        error=error,
    )


# Function that takes the finished spans of a piece of work; it must be quick and thread-safe. Its
# second argument is the UNIX time in nanoseconds at which the spans' clock showed 0.
SpanSink: TypeAlias = Callable[[Sequence[Span], int], None]


def zero_of(clock: Callable[[], float]) -> int:
    """Return the UNIX time at which a clock showed 0, in nanoseconds."""
    return time.time_ns() - round(clock() * 1e9)


def parse_traceparent(header: str, state: str = "") -> TraceContext | None:
    """Parse the W3C header ``traceparent``; return None if it is missing or invalid.

    Of a header with an unknown version, only the fields of version 00 are read, as W3C demands.
    """
    found = _PARENT.fullmatch(header) if header else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if (
        version == "ff"
        or (version == "00" and more)
        or not (int(trace_id, 16) and int(span_id, 16))
    ):
        return None
    if len(state) > MAX_STATE_CHARS or not state.isprintable():
        state = ""
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), is_sampled, state)


def random_id(num_bytes: int) -> bytes:
    """Return a random id of ``num_bytes``, never all zeros, which for W3C mean "no id"."""
    return (random.getrandbits(8 * num_bytes) or 1).to_bytes(num_bytes, "big")
