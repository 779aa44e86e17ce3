"""Describes an open request of a node to operators."""

from __future__ import annotations

from baton.link.words import RequestView
from engine.core.request import Request


def view_request(request: Request, transfer_state: str, age_s: float) -> RequestView:
    """What operators see of a request that came so long ago."""
    return RequestView(
        request_id=request.request_id,
        status=request.status.value,
        transfer_state=transfer_state,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=len(request.block_ids),
        age_s=age_s,
    )
