"""Make a router's ledgers of nodes, and fleets, without any nodes, to measure policies."""

from __future__ import annotations

from collections.abc import Callable

from baton.link.words import NodeRegistration, NodeRole
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import Account, NodeLoad, SharedRates
from router.policies.base import Placement, RouteQuery

KV_BYTES_PER_TOKEN = 131_072
BLOCK_SIZE = 16


def registration(name: str, role: NodeRole, num_blocks: int = 26_000) -> NodeRegistration:
    return NodeRegistration(
        node_name=name,
        engine_id=f"{name}-0",
        role=role,
        version="",
        address="",
        peer_info=b"",
        compatibility={},
        max_model_len=131_072,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        computes_prompts=role is NodeRole.DECODE,
    )


def make_loads(
    num_prefill: int, num_decode: int, clock: Callable[[], float], num_blocks: int = 26_000
) -> tuple[list[NodeLoad], list[NodeLoad]]:
    """Make empty ledgers of prefill nodes p000, p001, ... and decode nodes d000, d001, ...."""
    shared = SharedRates(kv_bytes_per_token=KV_BYTES_PER_TOKEN)
    prefills, decodes = (
        [
            NodeLoad(registration(f"{role.value[0]}{i:03}", role, num_blocks), shared, clock)
            for i in range(count)
        ]
        for role, count in ((NodeRole.PREFILL, num_prefill), (NodeRole.DECODE, num_decode))
    )
    return prefills, decodes


def make_fleet(
    prefills: list[NodeLoad],
    decodes: list[NodeLoad],
    bandwidth: Callable[[], float],
    *,
    may_self_prefill: bool = True,
) -> Fleet:
    """Make a fleet in which each pair of nodes is connected with ``bandwidth()`` bytes/s."""
    reach = {p.engine_id: {d.engine_id: bandwidth() for d in decodes} for p in prefills}
    alone = decodes if may_self_prefill else ()
    return Fleet(prefills, decodes, reach, self_prefilling=alone)


def open_legs(
    placement: Placement, query: RouteQuery, loads: dict[str, NodeLoad]
) -> list[tuple[NodeLoad, Account]]:
    """Count a placement in the nodes' ledgers, as the router does; return nodes and accounts."""
    num_tokens = query.num_prompt_tokens
    num_uncomputed = max(num_tokens - placement.num_cached_tokens, 1)
    opened = []
    if placement.prefill is not None:
        prefill = loads[placement.prefill.engine_id]
        account = prefill.note_opened(
            num_uncomputed, num_uncomputed=num_uncomputed, num_cached=num_tokens - num_uncomputed
        )
        opened.append((prefill, account))
    decode = loads[placement.decode.engine_id]
    account = decode.note_opened(
        num_tokens + query.max_tokens,
        num_uncomputed=0 if placement.prefill else num_uncomputed,
        num_cached=num_tokens - num_uncomputed,
        num_arriving=num_tokens,
    )
    return [*opened, (decode, account)]
