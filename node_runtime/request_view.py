"""Describes an open request of a node to operators."""

from __future__ import annotations

from baton.link.words import DecodeCommand, PrefillCommand, RequestView
from engine.core.request import Request


def view_request(request: Request, transfer_state: str, age_s: float) -> RequestView:
    """Return an operator's view of a request that arrived ``age_s`` seconds ago."""
    return RequestView(
        request_id=request.request_id,
        status=request.status.value,
        transfer_state=transfer_state,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=len(request.block_ids),
        age_s=age_s,
    )


def ids_of(command: PrefillCommand | DecodeCommand) -> dict[str, str | None]:
    """Return the ids that make log lines about a request searchable."""
    trace = command.trace
    trace_id = trace.trace_id.hex() if trace is not None else None
    return {"request_id": command.request_id, "trace_id": trace_id}
