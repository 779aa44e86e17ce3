"""Explain: where a prompt would go if it came now, and what else there is. Places nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from baton.api.errors import NodeUnavailableError
from router.calls.decisions import Decision
from router.calls.dispatcher import Dispatcher
from router.fleet.fleet import Fleet
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.policies.base import Candidate, RouteQuery


class _ListsAll(Protocol):
    """A policy that can tell of every place, not only of those that it looks at."""

    def explain(self, query: RouteQuery, fleet: Fleet) -> Sequence[Candidate]: ...


def explain_now(
    dispatcher: Dispatcher,
    num_prompt_tokens: int,
    max_tokens: int,
    token_ids: Sequence[int] | None = None,
    cache_salt: bytes = b"",
) -> Decision:
    """The decision on a prompt.

    Args:
        token_ids: of the prompt; None: with nothing of it cached.
        cache_salt: of whose prompt it would be.

    Raises NodeUnavailableError when there is no place for it.
    """
    pool = dispatcher.pool

    def find_cached_tokens() -> Mapping[str, int]:
        return (
            {}
            if token_ids is None
            else pool.prefix_index.match_tokens(PromptHashes(token_ids, cache_salt))
        )

    query = RouteQuery(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        now=time.monotonic(),
        find_cached_tokens=find_cached_tokens,
    )
    fleet = pool.fleet.with_room_for(num_prompt_tokens + 1)
    placement = dispatcher.placer.policy.pick(query, fleet)
    if placement is None:
        raise NodeUnavailableError(pool.why_no_pair(num_prompt_tokens + 1))
    prefill = placement.prefill.node_name if placement.prefill else ""
    decode = placement.decode.node_name
    candidates = placement.explain()
    if hasattr(dispatcher.placer.policy, "explain"):
        every = cast("_ListsAll", dispatcher.placer.policy).explain(query, fleet)
        # (Stable: what was chosen, then by cost.)
        candidates = sorted(every, key=lambda one: (one.prefill, one.decode) != (prefill, decode))
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
    )
