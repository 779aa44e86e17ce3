"""Placer: picks the nodes of a call's next attempt; waits if no nodes can take the call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from baton.api.errors import NodeUnavailableError
from router.calls.call import Call
from router.calls.decisions import DecisionLog
from router.fleet.fleet import Fleet
from router.fleet.node_pool import NodePool
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.policies.base import Placement, RouteQuery, RoutingPolicy

# Maximum number of calls that wait for a lost node to return. The number is limited, because each
# waiting call holds a prompt and a client's connection.
MAX_EXPECTING = 1024
# A timer may fire this many seconds too early. The deadline then counts as reached; otherwise the
# caller would ask again and again until the deadline is reached.
_EARLY_S = 1e-6


class Placer:
    """Places the calls of one base model on nodes.

    Args:
        num_queued: returns the number of requests that wait at the gate, for the policy.

    Attributes:
        policy: picks the nodes; may be replaced at any time.
        decisions: log of where the latest calls were placed, and why.
        num_waiting: number of calls that wait because no node can take them now.
    """

    def __init__(
        self, pool: NodePool, policy: RoutingPolicy, num_queued: Callable[[], int]
    ) -> None:
        self.policy = policy
        self.decisions = DecisionLog()
        self.num_waiting = 0
        self._pool = pool
        self._num_queued = num_queued

    def place(
        self,
        call: Call,
        output_token_ids: Sequence[int],
        *,
        remaining_s: float,
        narrow: Callable[[Fleet], Fleet],
        is_first: bool,
    ) -> Placement | None:
        """Pick the nodes of a call's next attempt; return None if no nodes can take it now.

        Args:
            output_token_ids: the call's output so far, which the attempt computes again as part of
                the prompt.
            remaining_s: seconds until the call's deadline.
            narrow: reduces a fleet to the nodes that suit this call best.
            is_first: whether this is the call's first attempt.
        """
        pool = self._pool
        token_ids = [*call.prompt_token_ids, *output_token_ids]
        adapter, hashes = call.terms.adapter, call.hashes
        if output_token_ids:
            hashes = PromptHashes(token_ids, call.cache_salt, adapter, call.image_spans)
        query = RouteQuery(
            num_prompt_tokens=len(token_ids),
            max_tokens=call.sampling_params.max_tokens - len(output_token_ids),
            session_id=call.terms.session_id,
            timeout_s=remaining_s,
            leaves_room=call.leaves_room,
            num_waiting=self._num_queued(),
            now=pool.clock(),
            find_cached_tokens=functools.cache(lambda: pool.find_cached_tokens(hashes)),
            adapter_load_s=pool.adapters.load_s(pool.fleet, adapter) if adapter else {},
        )
        num_tokens = query.num_prompt_tokens

        def pick(fleet: Fleet) -> Placement | None:
            if adapter:
                fleet = pool.adapters.narrow(fleet, adapter)
            if call.images:
                fleet = fleet.encoding_images()
            fleet = fleet.with_room_for(num_tokens + 1, num_tokens + query.max_tokens)
            return self.policy.pick(query, narrow(fleet))

        # Read `pool.fleet` before the rollout, because making the fleet may change the revisions
        # that the rollout knows.
        fleet, chosen = pool.fleet, None
        if call.pooling is not None:
            fleet = pool.prompt_fleet
        elif is_first:
            chosen = pool.rollout.choose(call.terms.session_id)
        placement = (pick(chosen) if chosen is not None else None) or pick(fleet)
        if placement is not None:
            self.decisions.note(call.scoped_id, query, placement, is_first=is_first)
            for node in filter(None, (placement.prefill, placement.decode)):
                pool.prefix_index.note_placement(node.engine_id, hashes)
                if adapter:
                    pool.adapters.note_placement(node, adapter)
        return placement

    async def wait_for_change(
        self,
        failure: str,
        num_tokens: int,
        until: float,
        adapter: str = "",
        *,
        has_images: bool = False,
        pools: bool = False,
    ) -> None:
        """Wait until the state of some node changes, but not longer than ``until``.

        Args:
            failure: why the previous attempt failed; empty for the first attempt.
            num_tokens: context length that a node must allow.
            adapter: digest of the adapter that a node must have or load; empty: no adapter.
            until: end of the wait, by the event loop's clock.
            has_images: whether the prompt has images, which a node must encode.
            pools: whether the call is pooled, and therefore needs only a prefill node.

        Raises:
            NodeUnavailableError: nodes of the needed roles have never joined, or the time is up.
        """
        pool = self._pool
        now = asyncio.get_running_loop().time() + _EARLY_S
        is_possible = pool.has_had_prefill if pools else pool.has_had_both_roles
        if not is_possible or now >= until:
            if pools:
                why_not = pool.why_no_prompt_node(num_tokens, adapter)
            else:
                why_not = pool.why_no_pair(num_tokens, adapter, has_images=has_images)
            why = "; ".join(filter(None, (failure, why_not)))
            raise NodeUnavailableError(why)
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(until):
                await pool.wait_for_change()
        except TimeoutError:
            pass  # time is up: the caller tries to place the call once more
        finally:
            self.num_waiting -= 1
