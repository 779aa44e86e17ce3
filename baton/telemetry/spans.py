"""Spans as plain values, made when what they tell of has ended. Knows no exporter.

A span is made of moments that were taken anyway: those of the receipt. So the two cannot tell
different stories, and a request that is not traced costs nothing.
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
    """What a span is to its parent; numbers of OpenTelemetry's protocol."""

    INTERNAL = 1  # of one process
    SERVER = 2  # the answer to a caller elsewhere
    CLIENT = 3  # a call of something elsewhere


class Span(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One stretch of work.

    Attributes:
        parent_id: of the span that it is part of; empty: of none.
        begin_s, end_s: seconds by the clock of who made it.
        links: other spans that it has to do with, and how.
        events: moments within it, by name.
        error: why it failed; empty: it did not.
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


# Takes the finished spans of one piece of work; safe to call from any thread, and quick.
# The second argument is the UNIX time at which the spans' clock showed 0, in nanoseconds.
SpanSink: TypeAlias = Callable[[Sequence[Span], int], None]


def zero_of(clock: Callable[[], float]) -> int:
    """Return the UNIX time at which a clock showed 0, in nanoseconds."""
    return time.time_ns() - round(clock() * 1e9)
