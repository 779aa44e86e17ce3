"""Job: a decode command in progress, and its receipt. DecodeTraces: spans of ended commands.

decode                                          from its command to its last token
  decode.parked                                 waits for its KV; the receipt's parked_s
  decode.first_step                             from the commit to token 2; receipt: first_step_s
  decode.steps                                  all later steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.api.outputs import DecodeReceipt
from baton.link.words import DecodeCommand
from baton.telemetry.spans import Attribute, SpanSink, child_span, request_span, zero_of
from decode_node.reservations import Reservation
from engine.core.request import Request
from node_runtime.prefixes.prefix_wait import PrefixWait


@dataclass(slots=True)
class Job:
    """A decode command in progress, with its request and reservation.

    Attributes:
        prefix: the wait for a cached prefix; None: no node sends one.
        first_step_s: seconds from the commit, or from the command if this node computes the prompt,
            until the first token; 0 before. Includes the wait for a prefix.
    """

    command: DecodeCommand
    request: Request
    reservation: Reservation
    prefix: PrefixWait | None = None
    first_step_s: float = 0.0
    steps_until_first: int = 0

    def receipt(self, why_drafts: str) -> DecodeReceipt:
        """Return the receipt of a request that ends now.

        Args:
            why_drafts: why the last step had this many drafts, in words.
        """
        reservation, request = self.reservation, self.request
        wait = self.prefix or PrefixWait()
        assert reservation.receipt is not None
        return DecodeReceipt(
            parked_s=reservation.committed_at - reservation.parked_at + wait.waited_s,
            first_step_s=max(self.first_step_s - wait.waited_s, 0.0),
            steps_until_first=self.steps_until_first,
            num_prompt_tokens_computed=request.num_prompt_tokens_computed,
            num_forwards=request.num_forwards,
            num_preemptions=request.num_preemptions,
            push=reservation.receipt,
            num_cached_tokens=request.num_hit_tokens,
            num_drafts=request.num_drafts,
            num_accepted_drafts=request.num_accepted_drafts,
            why_drafts=why_drafts,
            num_pinned_tokens=request.num_pinned_tokens,
            num_fetched_tokens=wait.num_tokens,
            num_fetches_lost=int(wait.is_lost),
            fetch_wait_s=wait.waited_s,
        )


class DecodeTraces:
    """Emits the trace spans of requests on one decode node.

    Args:
        sink: receives the spans of ended requests; None: no tracing.
        clock: the node's clock.
    """

    def __init__(self, sink: SpanSink | None, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock

    def end_trace(
        self,
        command: DecodeCommand,
        parked_at: float,
        *,
        committed_at: float = 0.0,
        first_step_s: float = 0.0,
        receipt: DecodeReceipt | None = None,
        error: str = "",
    ) -> None:
        """Emit the spans of a request that ended here; do nothing if it is not traced.

        Args:
            parked_at, committed_at: when the request was parked and committed, by the node's clock;
                0: never.
            receipt: the request's receipt; None: it ended with an error.
            error: why the request failed; empty: it did not fail.
        """
        if self._sink is None or command.trace is None:
            return
        trace, request_id, ended_at = command.trace, command.request_id, self._clock()
        counts = _counts(receipt)
        whole = request_span(
            "decode", trace, request_id, parked_at, ended_at, counts=counts, error=error
        )
        root, arrived_at = whole.context, committed_at or ended_at
        made = [whole, child_span("decode.parked", root, parked_at, arrived_at, _pushed(receipt))]
        if committed_at:
            first_at = committed_at + first_step_s if first_step_s else ended_at
            made.append(child_span("decode.first_step", root, committed_at, first_at))
            if first_at < ended_at:
                made.append(child_span("decode.steps", root, first_at, ended_at))
        self._sink(made, zero_of(self._clock))


def _counts(receipt: DecodeReceipt | None) -> dict[str, Attribute]:
    if receipt is None:
        return {}
    return {
        "baton.forwards": receipt.num_forwards,
        "baton.prompt_tokens_computed": receipt.num_prompt_tokens_computed,
        "baton.cached_tokens": receipt.num_cached_tokens,
    }


def _pushed(receipt: DecodeReceipt | None) -> dict[str, Attribute]:
    if receipt is None or not receipt.push.num_blocks:
        return {}
    push = receipt.push
    return {
        "baton.kv_bytes": push.num_bytes,
        "baton.kv_transport": push.transport,
        "baton.exposed_transfer_s": push.exposed_transfer_s,
    }
