"""TraceContext: the place in a trace that work belongs to, and W3C's headers that say so."""

from __future__ import annotations

import random
import re

import msgspec

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512  # W3C has all forward at least so many; longer ones are left out

_PARENT = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL
)
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A span, by its ids. What is part of it is its children, in whatever process.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes; none: the trace has no span yet, and the next one is its root.
        is_sampled: spans of this trace are kept.
        state: of other systems, handed on as it came.
    """

    trace_id: bytes
    span_id: bytes = b""
    is_sampled: bool = True
    state: str = ""

    def child(self) -> TraceContext:
        """Make the context of a new span that is part of this one."""
        return TraceContext(self.trace_id, random_id(8), self.is_sampled, self.state)

    @property
    def traceparent(self) -> str:
        """W3C's header for what this span calls."""
        flags = _SAMPLED if self.is_sampled else 0
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{flags:02x}"


def parse_traceparent(header: str, state: str = "") -> TraceContext | None:
    """Read W3C's header ``traceparent``; None where there is none, or one that is wrong.

    Of a version that is not known only what version 00 has counts, as W3C wants it.
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
    """An id of that length; never all zeros, which W3C has stand for none."""
    return (random.getrandbits(8 * num_bytes) or 1).to_bytes(num_bytes, "big")
