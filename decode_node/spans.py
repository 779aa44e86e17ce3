"""Spans of a request on a decode node, made when the request ends here.

decode                                          from its command to its last token
  decode.parked                                 waits for its KV; the receipt's parked_s
  decode.first_step                             from the commit to token 2; receipt: first_step_s
  decode.steps                                  all later steps
"""

from __future__ import annotations

from collections.abc import Callable

from baton.api.outputs import DecodeReceipt
from baton.link.words import DecodeCommand
from baton.telemetry.spans import (
    Attribute,
    Span,
    SpanKind,
    SpanSink,
    TraceContext,
    child_span,
    zero_of,
)


class DecodeTraces:
    """The traced requests of one node.

    Args:
        sink: takes the spans of ended requests; None: no tracing.
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
        """Emit a request's spans, as it ended here; do nothing if it is not traced.

        Args:
            parked_at, committed_at: moments by the node's clock; 0: not reached.
            receipt: the receipt of a request that ended well.
            error: why a request failed.
        """
        if self._sink is None or command.trace is None:
            return
        root, ended_at = command.trace.child(), self._clock()
        made = [
            _request_span(command, root, parked_at, ended_at, receipt, error),
            child_span(
                "decode.parked", root, parked_at, committed_at or ended_at, _pushed(receipt)
            ),
        ]
        if committed_at:
            first_at = committed_at + first_step_s if first_step_s else ended_at
            made.append(child_span("decode.first_step", root, committed_at, first_at))
            if first_at < ended_at:
                made.append(child_span("decode.steps", root, first_at, ended_at))
        self._sink(made, zero_of(self._clock))


def _request_span(
    command: DecodeCommand,
    root: TraceContext,
    begin_s: float,
    end_s: float,
    receipt: DecodeReceipt | None,
    error: str,
) -> Span:
    assert command.trace is not None
    attributes: dict[str, Attribute] = {"baton.request_id": command.request_id}
    if receipt is not None:
        attributes["baton.forwards"] = receipt.num_forwards
        attributes["baton.prompt_tokens_computed"] = receipt.num_prompt_tokens_computed
        attributes["baton.cached_tokens"] = receipt.num_cached_tokens
    return Span(
        name="decode",
        context=root,
        parent_id=command.trace.span_id,
        begin_s=begin_s,
        end_s=end_s,
        kind=SpanKind.SERVER,
        attributes=attributes,
        error=error,
    )


def _pushed(receipt: DecodeReceipt | None) -> dict[str, Attribute]:
    if receipt is None or not receipt.push.num_blocks:
        return {}
    push = receipt.push
    return {
        "baton.kv_bytes": push.num_bytes,
        "baton.kv_transport": push.transport,
        "baton.exposed_transfer_s": push.exposed_transfer_s,
    }
