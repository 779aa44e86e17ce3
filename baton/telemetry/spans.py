"""Spans as plain values, made when the work they describe has ended. Knows no exporter.

Spans are made from the times that receipts need anyway. So traces and receipts agree, and requests
that are not traced cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from baton.telemetry.trace_context import TraceContext

Attribute: TypeAlias = str | bool | int | float | tuple[str, ...]


class SpanKind(IntEnum):
    """A span's relation to its parent; OpenTelemetry's numbers."""

    INTERNAL = 1  # work within one process
    SERVER = 2  # work for a caller in another process
    CLIENT = 3  # a call to another process


class Span(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One piece of work with its begin and end.

    Attributes:
        parent_id: id of the parent span; empty: no parent.
        begin_s, end_s: seconds by the clock of the code that made it.
        links: related spans, and how they are related.
        events: moments within it, by name.
        error: why it failed; empty: it did not fail.
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


# Takes the finished spans of one piece of work; quick and thread-safe. The second argument is the
# UNIX time of the spans' clock's 0, in nanoseconds.
SpanSink: TypeAlias = Callable[[Sequence[Span], int], None]


def zero_of(clock: Callable[[], float]) -> int:
    """Return the UNIX time at which a clock showed 0, in nanoseconds."""
    return time.time_ns() - round(clock() * 1e9)
