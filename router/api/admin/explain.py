"""Explain: tells on which nodes a prompt would be placed now, without placing it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, cast

from baton.api.errors import NodeUnavailableError
from baton.link.words import NodeRole
from router.calls.decisions import Decision
from router.calls.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.policies.base import Candidate, RouteQuery


class _ListsAll(Protocol):
    """A routing policy that can list all pairs of nodes, including pairs that `pick` skips."""

    def explain(self, query: RouteQuery, fleet: Fleet) -> Sequence[Candidate]: ...


def explain_now(
    dispatcher: Dispatcher,
    num_prompt_tokens: int,
    max_tokens: int,
    token_ids: Sequence[int] | None = None,
    cache_salt: bytes = b"",
    adapter: str = "",
) -> Decision:
    """Return the placement that a prompt would get now, and the alternatives.

    Args:
        token_ids: the prompt's token ids; None: assume that no part of the prompt is cached.
        cache_salt: selects the cached blocks that the prompt may use.
        adapter: digest of the adapter that computes the prompt; empty: the base model.

    Raises NodeUnavailableError if no node can take the prompt.
    """
    pool = dispatcher.pool

    hashes = None if token_ids is None else PromptHashes(token_ids, cache_salt, adapter)

    def find_cached_tokens(role: NodeRole) -> Mapping[str, int]:
        return {} if hashes is None else pool.find_cached_tokens(hashes, role)

    query = RouteQuery(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        now=time.monotonic(),
        find_cached_tokens=partial(find_cached_tokens, NodeRole.PREFILL),
        find_cached_alone=partial(find_cached_tokens, NodeRole.DECODE),
        adapter_load_s=pool.adapters.load_s(pool.fleet, adapter) if adapter else {},
    )
    fleet = pool.adapters.narrow(pool.fleet, adapter) if adapter else pool.fleet
    fleet = fleet.with_room_for(num_prompt_tokens + 1)
    placement = dispatcher.placer.policy.pick(query, fleet)
    if placement is None:
        raise NodeUnavailableError(pool.why_no_pair(num_prompt_tokens + 1, adapter))
    prefill = placement.prefill.node_name if placement.prefill else ""
    decode = placement.decode.node_name
    candidates = placement.explain()
    if hasattr(dispatcher.placer.policy, "explain"):
        every = cast("_ListsAll", dispatcher.placer.policy).explain(query, fleet)
        # Put the chosen nodes first; the other candidates stay sorted by cost.
        candidates = sorted(every, key=lambda one: (one.prefill, one.decode) != (prefill, decode))
    node = pool.node((placement.prefill or placement.decode).engine_id)
    sources = (
        [source.terms for source in pool.list_prefix_sources(node, hashes, num_prompt_tokens)]
        if node is not None and hashes is not None
        else []
    )
    return Decision(
        request_id="",
        placed_at=time.time(),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        num_cached_tokens=placement.num_cached_tokens,
        prefill_node=prefill,
        decode_node=decode,
        candidates=candidates,
        is_probe=placement.is_probe,
        sources=sources,
    )
