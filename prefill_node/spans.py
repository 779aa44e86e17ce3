"""Trace spans of a request on a prefill node; they are made when the request ends on this node.

prefill                                         from its command to the end of its push
  prefill.queue                                 waits for its first chunk; the receipt's queue_s
  prefill.compute                               up to token 1; the receipt's prefill_s
    prefill.chunk ...
  prefill.push                                  from first chunk until the decode node has its KV
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.api.outputs import PrefillReceipt
from baton.link.words import PrefillCommand
from baton.telemetry.spans import (
    Attribute,
    Span,
    SpanSink,
    TraceContext,
    child_span,
    request_span,
    zero_of,
)

Key: TypeAlias = tuple[str, int]  # request id and epoch


@dataclass(slots=True, kw_only=True)
class PrefillTrace:
    """Times of a traced request, by the node's clock.

    Attributes:
        parent: context of the router's attempt.
        chunks: for each chunk, the time when it was scheduled and, later, when it was computed.
        error: why the request failed; empty: it did not fail.
    """

    parent: TraceContext
    request_id: str
    decode_node: str
    received_at: float
    started_at: float = 0.0
    computed_at: float = 0.0
    chunks: list[list[float]] = field(default_factory=list)
    receipt: PrefillReceipt | None = None
    error: str = ""

    def begin_chunk(self, now: float) -> None:
        """Record the time when the next chunk is scheduled."""
        self.chunks.append([now])

    def end_chunk(self, now: float) -> None:
        """Record the time when the oldest chunk in flight is computed."""
        for chunk in self.chunks:
            if len(chunk) == 1:
                chunk.append(now)
                return

    def spans(self, now: float, *, has_pushed: bool) -> list[Span]:
        """Return all spans of the request; spans that have no end yet end now.

        Args:
            has_pushed: whether the request's KV was sent to a decode node.
        """
        counts: dict[str, Attribute] = {}
        if self.receipt is not None:
            counts["baton.chunks"] = self.receipt.num_chunks
            counts["baton.computed_tokens"] = self.receipt.num_computed_tokens
            counts["baton.cached_tokens"] = self.receipt.num_cached_tokens
            if self.receipt.num_encodings_received or self.receipt.num_encodings_lost:
                counts["baton.encodings_received"] = self.receipt.num_encodings_received
                counts["baton.encodings_lost"] = self.receipt.num_encodings_lost
            if self.receipt.num_images_encoded or self.receipt.num_encodings_cached:
                counts["baton.images_encoded"] = self.receipt.num_images_encoded
                counts["baton.encodings_cached"] = self.receipt.num_encodings_cached
                counts["baton.pixels_wait_s"] = self.receipt.pixels_wait_s
                counts["baton.encoder_s"] = self.receipt.encoder_s
            if self.receipt.num_fetched_tokens or self.receipt.num_fetches_lost:
                counts["baton.fetched_tokens"] = self.receipt.num_fetched_tokens
                counts["baton.fetches_lost"] = self.receipt.num_fetches_lost
        parent, request_id, begin_s = self.parent, self.request_id, self.received_at
        whole = request_span(
            "prefill", parent, request_id, begin_s, now, counts=counts, error=self.error
        )
        root = whole.context
        started_at, computed_at = self.started_at or now, self.computed_at or now
        made = [whole, child_span("prefill.queue", root, self.received_at, started_at)]
        if not self.started_at:
            return made
        compute = child_span("prefill.compute", root, started_at, computed_at)
        made.append(compute)
        made += (
            child_span("prefill.chunk", compute.context, chunk[0], (*chunk[1:], now)[0])
            for chunk in self.chunks
        )
        if has_pushed:
            to: dict[str, Attribute] = {"baton.decode_engine_id": self.decode_node}
            made.append(child_span("prefill.push", root, started_at, now, to))
        return made


class PrefillTraces:
    """The traced requests of one prefill node; empty if there is no tracing.

    Args:
        sink: receives the spans of ended requests; None: no tracing.
        clock: the node's clock.
    """

    def __init__(self, sink: SpanSink | None, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._open: dict[Key, PrefillTrace] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def start_trace(self, command: PrefillCommand, received_at: float) -> None:
        """Start the trace of a command's request, if the router traces it."""
        if self._sink is not None and command.trace is not None:
            self._open[command.request_id, command.epoch] = PrefillTrace(
                parent=command.trace,
                request_id=command.request_id,
                decode_node=command.decode_engine_id,
                received_at=received_at,
            )

    def get(self, request_id: str, epoch: int) -> PrefillTrace | None:
        """Return the trace of a request; None: it is not traced."""
        return self._open.get((request_id, epoch))

    def note_computed(
        self, command: PrefillCommand, receipt: PrefillReceipt, started_at: float, now: float
    ) -> None:
        """Record that token 1 of a request is sampled."""
        trace = self._open.get((command.request_id, command.epoch))
        if trace is not None:
            trace.started_at, trace.computed_at, trace.receipt = started_at, now, receipt

    def end_trace(
        self, request_id: str, epoch: int, error: str = "", *, has_pushed: bool = False
    ) -> None:
        """Emit the spans of a request that ended here; do nothing if it is not traced."""
        trace = self._open.pop((request_id, epoch), None) if self._open else None
        if trace is None or self._sink is None:
            return
        trace.error = error
        now = self._clock()
        self._sink(trace.spans(now, has_pushed=has_pushed), zero_of(self._clock))

    def end_others(self, is_open: Callable[[str, int], bool]) -> None:
        """End the traces of requests whose hand-off is no longer open."""
        for request_id, epoch in [key for key in self._open if not is_open(*key)]:
            self.end_trace(request_id, epoch, has_pushed=True)
