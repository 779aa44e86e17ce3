"""Spans of a request on a decode node, made when the request ends here.

decode                                          from its command to its last token
  decode.parked                                 waits for its KV; the receipt's parked_s
  decode.first_step                             from the commit to token 2; receipt: first_step_s
  decode.steps                                  all later steps
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.outputs import DecodeReceipt
from baton.link.words import DecodeCommand
from baton.telemetry.spans import Attribute, Span, SpanKind, TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMoments:
    """Moments of a request, by the node's clock; 0: not reached."""

    parked_at: float
    committed_at: float = 0.0
    first_step_s: float = 0.0


def decode_spans(
    command: DecodeCommand,
    moments: DecodeMoments,
    ended_at: float,
    receipt: DecodeReceipt | None,
    error: str = "",
) -> list[Span]:
    """Return all spans of a traced request.

    Args:
        receipt: the receipt of a request that ended well.
        error: why a request failed.
    """
    parent = command.trace
    assert parent is not None
    attributes: dict[str, Attribute] = {"baton.request_id": command.request_id}
    pushed: dict[str, Attribute] = {}
    if receipt is not None:
        attributes["baton.forwards"] = receipt.num_forwards
        attributes["baton.prompt_tokens_computed"] = receipt.num_prompt_tokens_computed
        attributes["baton.cached_tokens"] = receipt.num_cached_tokens
        push = receipt.push
        if push.num_blocks:
            pushed["baton.kv_bytes"] = push.num_bytes
            pushed["baton.kv_transport"] = push.transport
            pushed["baton.exposed_transfer_s"] = push.exposed_transfer_s
    root, committed_at = parent.child(), moments.committed_at
    made = [
        Span(
            name="decode",
            context=root,
            parent_id=parent.span_id,
            begin_s=moments.parked_at,
            end_s=ended_at,
            kind=SpanKind.SERVER,
            attributes=attributes,
            error=error,
        ),
        _child(root, "decode.parked", moments.parked_at, committed_at or ended_at, pushed),
    ]
    if committed_at:
        first_at = committed_at + moments.first_step_s if moments.first_step_s else ended_at
        made.append(_child(root, "decode.first_step", committed_at, first_at))
        if first_at < ended_at:
            made.append(_child(root, "decode.steps", first_at, ended_at))
    return made


def _child(
    root: TraceContext,
    name: str,
    begin_s: float,
    end_s: float,
    attributes: dict[str, Attribute] | None = None,
) -> Span:
    return Span(
        name=name,
        context=root.child(),
        parent_id=root.span_id,
        begin_s=begin_s,
        end_s=end_s,
        attributes=attributes or {},
    )
