"""Placer: picks the nodes of a call's next attempt; waits if no nodes can take the call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from baton.api.errors import NodeUnavailableError
from baton.api.images import without_files
from baton.link.words import PAIR_ROLES, ShareCommand
from router.calls.call import Call
from router.calls.decisions import DecisionLog
from router.calls.prompt_supply import PromptSupply
from router.fleet.fleet import Fleet
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.policies.base import Placement, RouteQuery, RoutingPolicy

# Maximum number of calls that wait for a lost node to return. The number is limited, because each
# waiting call holds a prompt and a client's connection.
MAX_EXPECTING = 1024
# A timer may fire this many seconds too early. The deadline then counts as reached. Otherwise, the
# caller would try to place the call again and again until the deadline.
_EARLY_S = 1e-6
# A node stops sending a cached prefix after this many seconds, whatever `--fetch-timeout-s` is.
SHARE_TIMEOUT_S = 30.0


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
        adapter = call.terms.adapter
        token_ids, hashes = _tokens_and_hashes(call, output_token_ids)
        find_cached, find_alone = (
            functools.cache(functools.partial(pool.find_cached_tokens, hashes, role))
            for role in PAIR_ROLES
        )
        query = RouteQuery(
            num_prompt_tokens=len(token_ids),
            max_tokens=call.sampling_params.max_tokens - len(output_token_ids),
            session_id=call.terms.session_id,
            timeout_s=remaining_s,
            leaves_room=call.leaves_room,
            num_waiting=self._num_queued(),
            now=pool.clock(),
            find_cached_tokens=find_cached,
            find_cached_alone=find_alone if pool.prefix_sources else None,
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
            nodes = [node for node in (placement.prefill, placement.decode) if node is not None]
            if call.terms.pins is not None and call.terms.pins.session:
                engine_ids = [node.engine_id for node in nodes]
                pool.session_places.note_placement(call.terms.pins.session, engine_ids, hashes)
            for node in nodes:
                pool.prefix_index.note_placement(node.engine_id, hashes)
                if adapter:
                    pool.adapters.note_placement(node, adapter)
        return placement

    def plan_supply(
        self,
        call: Call,
        output_token_ids: Sequence[int],
        prefill: Node | None,
        decode: Node,
        epoch: int,
        num_cached_tokens: int,
    ) -> PromptSupply:
        """Choose what other nodes send to the node that computes the prompt of the next attempt.

        Args:
            output_token_ids: the call's output so far.
            prefill: the attempt's prefill node; None: the decode node computes the prompt alone.
            epoch: number of the attempt.
            num_cached_tokens: number of prompt tokens that the computing node probably has in its
                cache.
        """
        pool, request_id = self._pool, call.scoped_id
        encodings = pool.plan_encodings(request_id, epoch, call.images, prefill, num_cached_tokens)
        # Logprobs of the prompt and pooling need a node that computes the whole prompt.
        if call.pooling is not None or call.sampling_params.prompt_logprobs is not None:
            return PromptSupply(encodings)
        reader = prefill or decode
        token_ids, hashes = _tokens_and_hashes(call, output_token_ids)
        sources = pool.list_prefix_sources(reader, hashes, len(token_ids))
        self.decisions.note_sources(request_id, [source.terms for source in sources])
        if not sources or not sources[0].terms.is_chosen:
            return PromptSupply(encodings)
        source, images = sources[0], without_files(call.images)
        num_tokens = source.num_tokens
        command = ShareCommand(
            request_id=request_id,
            epoch=epoch,
            reader_engine_id=reader.engine_id,
            timeout_s=SHARE_TIMEOUT_S,
            prompt_token_ids=token_ids[:num_tokens],
            cache_salt=call.cache_salt,
            adapter=call.terms.adapter,
            images=tuple(image for image in images if image.span.first < num_tokens),
        )
        return PromptSupply(encodings, source, command)

    def note_forecast(self, call: Call, node: Node, epoch: int) -> None:
        """Log the forecast of the time at which a node will have computed an attempt's prompt."""
        self.decisions.note_forecast(call.scoped_id, node.forecast_of(epoch))

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
            NodeUnavailableError: no nodes of the needed roles are expected, or the time is up.
        """
        pool = self._pool
        now = asyncio.get_running_loop().time() + _EARLY_S
        is_possible = pool.expects_prefill if pools else pool.expects_pair
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


def _tokens_and_hashes(
    call: Call, output_token_ids: Sequence[int]
) -> tuple[list[int], PromptHashes]:
    """Return the tokens that a call's next attempt has as its prompt, and their block hashes."""
    if not output_token_ids:
        return call.prompt_token_ids, call.hashes
    token_ids = [*call.prompt_token_ids, *output_token_ids]
    adapter = call.terms.adapter
    return token_ids, PromptHashes(token_ids, call.cache_salt, adapter, call.image_spans)
