"""Describes a node to others: its load, its open requests, and a ledger of who owns which blocks.

Refuses to know: peers, transfers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from baton.link.words import DecodeCommand, NodeBeat, PrefillCommand, RequestView
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger, balance
from engine.core.request import Request, RequestStatus
from engine.engine import Engine
from kvconnector.base import HandoffMetrics
from node_runtime.inbox import Inbox


def describe_load(
    engine: Engine,
    inbox: Inbox[Any],
    requests: Sequence[Request],
    *,
    num_running: int,
    num_quarantined_blocks: int,
    num_transfers: int,
    num_waiting_for_encodings: int = 0,
    handoffs: HandoffMetrics | None = None,
) -> NodeBeat:
    """Return a node's report of its load; safe from any thread.

    Args:
        inbox: queue of the node's commands.
        requests: the engine's open requests, among which ``num_running`` run.
        handoffs: metrics with the fetched prefixes; None: the node fetches none.
    """
    parked = RequestStatus.WAITING_FOR_REMOTE_KVS
    to_compute = [request for request in requests if request.status is not parked]
    num_held = inbox.num_waiting
    return NodeBeat(
        num_waiting=len(to_compute) - num_running + num_held,
        num_waiting_for_remote_kvs=len(requests) - len(to_compute),
        num_running=num_running,
        num_free_blocks=engine.block_pool.num_free,
        num_quarantined_blocks=num_quarantined_blocks,
        num_transfers=num_transfers,
        adapters=engine.adapters.digests,
        num_waiting_for_adapters=num_held,
        adapter_load_s=inbox.adapter_load_s,
        num_waiting_for_encodings=num_waiting_for_encodings,
        cache=engine.figures.cache_use(
            handoffs.fetched_tokens if handoffs else 0,
            handoffs.fetched_ages.median_s() if handoffs else 0.0,
        ),
        num_decoding_images=sum(map(_decodes_images, to_compute)),
        num_waiting_for_prefixes=sum(
            request.status is RequestStatus.WAITING_FOR_PREFIX for request in to_compute
        ),
        num_uncomputed_tokens=sum(
            max(request.num_initial_tokens - request.num_computed_tokens, 0)
            for request in to_compute
        ),
    )


def _decodes_images(request: Request) -> bool:
    """Return whether a request waits until this node has decoded its image files."""
    images, status = request.images, request.status
    return status is RequestStatus.WAITING_FOR_PIXELS and not (images and images.awaits_encodings)


def take_ledger(
    engine: Engine, held: Iterable[BlockHolding], encodings: Ledger | None = None
) -> Ledger:
    """Return which owners hold which blocks now; takes O(num_blocks) time.

    Call this on the engine's thread, between two steps.

    Args:
        held: blocks that owners other than the engine's requests hold. A request whose blocks are
            in a holding of the kind GRANT is not listed a second time.
        encodings: owners of the memory for encodings; None: there is none.
    """
    others = [*held, *engine.features.held_by_files()]
    granted = {holding.request_id for holding in others if holding.owner is BlockOwner.GRANT}
    own = [
        _hold(request, BlockOwner.REQUEST)
        for request in engine.requests.values()
        if request.request_id not in granted
    ]
    computed = {item.request for step in engine.steps_in_flight for item in step.scheduled}
    own += [_hold(r, BlockOwner.STEP) for r in computed if r.status.is_finished]
    # A null block is in many block tables, but has only one reference.
    null_blocks = tuple(range(engine.kv_memory.spec.num_null_blocks))
    holdings = [BlockHolding(owner=BlockOwner.NULL_BLOCK, block_ids=null_blocks)]
    for holding in [*own, *others]:
        block_ids = tuple(b for b in holding.block_ids if b not in null_blocks)
        holdings.append(dataclasses.replace(holding, block_ids=block_ids))
    ledger = balance(
        [holding for holding in holdings if holding.block_ids],
        engine.block_pool.ref_counts(),
        num_blocks=engine.num_blocks,
        num_free_blocks=engine.block_pool.num_free,
    )
    return dataclasses.replace(ledger, encodings=encodings)


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
    """Return the ids that each log line about a command has, so that its lines can be found."""
    trace = command.trace
    trace_id = trace.trace_id.hex() if trace is not None else None
    return {"request_id": command.request_id, "trace_id": trace_id}


def _hold(request: Request, owner: BlockOwner) -> BlockHolding:
    now = time.monotonic()
    return BlockHolding(
        owner=owner,
        request_id=request.request_id,
        state=request.status.value,
        age_s=0.0 if request.started_at is None else now - request.started_at,
        block_ids=tuple(request.block_ids),
    )
