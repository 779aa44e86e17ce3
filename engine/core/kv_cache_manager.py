"""KVCacheManager: the blocks of each request. Knows ids, hashes and token counts, no tensor.

A logical block is the KV of ``block_size`` tokens in all groups of layers, hence ``num_groups``
blocks of the pool; ``Request.block_ids`` has them all (`engine/core/kv_cache_coordinator.py`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.block_hash import BlockHash, BlockHasher
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_coordinator import KVCacheCoordinator
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class GrantedBlocks:
    """Where a remote node writes a parked request's initial tokens.

    Attributes:
        first_block: how many of the blocks that travel (`KVCacheManager.handoff_indices`) are here
            already; the others are to be written.
        block_ids: of those others, in order.
        groups: of each block that travels, its KV cache group; empty: there is one.
    """

    first_block: int
    block_ids: tuple[int, ...]
    groups: tuple[int, ...] = ()


class KVCacheManager:
    """Gives requests the blocks that their tokens need, and takes them back.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
        sliding_windows: of each KV cache group; None: full attention.
        hasher: of blocks, for the prefix cache; None switches it off.
        record_events: keep what the prefix cache stored and removed.

    Attributes:
        slides: whether blocks slide out of a window, so that `free_slid_out` has something to do.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        sliding_windows: Sequence[int | None] = (None,),
        hasher: BlockHasher | None = None,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, record_events=record_events)
        self.num_groups = len(sliding_windows)
        self._coordinator = KVCacheCoordinator(sliding_windows, block_size, self.block_pool)
        self._null_block = self._coordinator.null_block
        self.slides = self._null_block is not None
        self._hasher = hasher

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, of all groups together, that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def num_tokens_held(self, request: Request) -> int:
        """Tokens that the request's blocks have room for."""
        return len(request.block_ids) // self.num_groups * self.block_size

    # ------------------------------------------------------------------ prefix cache

    def find_cached_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix of a request, without taking them.

        The last known token is left out: it must be computed for its logits. Who wants logprobs of
        the prompt needs the logits of all of it, and finds nothing.
        """
        if request.wants_prompt_logprobs:
            return []
        return self._longest_hit(request, request.num_tokens - 1)

    def num_usable_cached_tokens(self, request: Request) -> int:
        """Tokens in `find_cached_blocks`."""
        return len(self.find_cached_blocks(request)) // self.num_groups * self.block_size

    def _longest_hit(self, request: Request, num_tokens: int) -> list[int]:
        """Cached blocks, of all groups, for as many of the first ``num_tokens`` as possible."""
        if self._hasher is None:
            return []
        self._hasher.extend(request.block_hashes, request.token_ids, request.extra_keys)
        hashes = request.block_hashes[: num_tokens // self.block_size]
        return self._coordinator.longest_hit(hashes, reads=request.is_drafted_for)

    def allocate_with_prefix(self, request: Request, num_reserved: int = 0) -> int | None:
        """Give a request without blocks its cached prefix, and room for all its known tokens.

        Args:
            num_reserved: blocks that must be left free after that.

        Returns:
            The tokens of the prefix, or None, with nothing changed, when too few blocks are free.
        """
        assert not request.block_ids
        cached = self.find_cached_blocks(request)
        num_new = self.num_blocks_for(request.num_tokens) - len(cached)
        pool = self.block_pool
        taken = [block_id for block_id in cached if block_id != self._null_block]
        if num_new + pool.num_free_among(taken) + num_reserved > pool.num_free:
            return None
        pool.touch(taken)
        new_block_ids = pool.allocate(num_new, extents=True)
        assert new_block_ids is not None
        request.block_ids = cached + new_block_ids
        request.num_cached_blocks = len(cached) // self.num_groups
        return request.num_cached_blocks * self.block_size

    def share_prompt(self, request: Request, sibling: Request) -> None:
        """Give ``sibling``, which has no blocks, the full blocks of the prompt of ``request``.

        The prompt's last token is left out, as with any prefix: it gives the sibling its logits.
        """
        num_blocks = (request.num_prompt_tokens - 1) // self.block_size
        null_block = self._null_block
        sibling.block_ids = request.block_ids[: num_blocks * self.num_groups]
        self.block_pool.hold(b for b in sibling.block_ids if b != null_block)
        sibling.block_hashes = request.block_hashes[:num_blocks]
        sibling.num_cached_blocks = min(request.num_cached_blocks, num_blocks)
        sibling.num_computed_tokens = num_blocks * self.block_size
        sibling.num_cached_tokens = sibling.num_computed_tokens
        sibling.is_drafted_for = request.is_drafted_for

    def cache_blocks(self, request: Request, *, is_read: bool = True) -> None:
        """Cache the request's blocks that are full and computed, so that others can find them.

        Args:
            is_read: whether who guesses has read what was not cached before, if somebody must.
        """
        self._cache_up_to(request, request.num_computed_tokens, is_read=is_read)

    def _cache_up_to(self, request: Request, num_tokens: int, *, is_read: bool = True) -> None:
        if self._hasher is None:
            return
        num_full = num_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full <= first:
            return
        self._hasher.extend(request.block_hashes, request.token_ids, request.extra_keys)
        hashes = request.block_hashes
        self._coordinator.cache(request.block_ids, hashes, first, num_full, is_read=is_read)
        request.num_cached_blocks = num_full

    def find_initial_prefix(self, request: Request) -> tuple[int, list[BlockHash]]:
        """What is cached of a request's initial tokens, the last one included, without taking it.

        Returns:
            The number of these tokens, and the hashes of the full blocks that are lacking; none
            where there is no prefix cache.
        """
        cached = self._longest_hit(request, request.num_initial_tokens)
        num_blocks = len(cached) // self.num_groups
        num_full = request.num_initial_tokens // self.block_size
        lacking = request.block_hashes[num_blocks:num_full]
        return num_blocks * self.block_size, lacking

    # ------------------------------------------------------------------ blocks

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make the request's blocks hold ``num_tokens`` tokens.

        Returns:
            The block ids that were added (maybe none), or None, with nothing changed, when too few
            blocks are free.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        new_block_ids = self.block_pool.allocate(missing)
        if new_block_ids is not None:
            request.block_ids.extend(new_block_ids)
        return new_block_ids

    def allocate_for_handoff(self, request: Request, num_tokens: int) -> bool:
        """Give a request without blocks its cached prefix, and room for what arrives and follows.

        The last initial token may be in that prefix: the remote node has its logits.

        Args:
            num_tokens: to have room for; at least the initial ones. What slides out before their
                end gets no block.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        assert not request.block_ids
        num_initial_blocks = self.num_blocks_for(request.num_initial_tokens)
        places = self.handoff_indices(request.num_initial_tokens)
        places += range(num_initial_blocks, self.num_blocks_for(num_tokens))
        cached = self._longest_hit(request, request.num_initial_tokens)
        num_hits = bisect.bisect_left(places, len(cached))
        taken = [cached[place] for place in places[:num_hits]]
        pool = self.block_pool
        if len(places) - num_hits + pool.num_free_among(taken) > pool.num_free:
            return False
        pool.touch(taken)
        new_block_ids = pool.allocate(len(places) - num_hits, extents=True)
        assert new_block_ids is not None
        num_blocks = self.num_blocks_for(num_tokens)
        if len(places) == num_blocks:
            request.block_ids = taken + new_block_ids
        else:
            assert self._null_block is not None
            request.block_ids = [self._null_block] * num_blocks
            for place, block_id in zip(places, taken + new_block_ids, strict=True):
                request.block_ids[place] = block_id
        request.num_cached_blocks = len(cached) // self.num_groups
        return True

    def blocks_to_receive(self, request: Request) -> GrantedBlocks:
        """List the blocks for a request's hand-off that are not cached, hence must arrive."""
        places = self.handoff_indices(request.num_initial_tokens)
        first = bisect.bisect_left(places, request.num_cached_blocks * self.num_groups)
        block_ids = tuple(request.block_ids[place] for place in places[first:])
        several = self.num_groups > 1
        groups = tuple(place % self.num_groups for place in places) if several else ()
        return GrantedBlocks(first, block_ids, groups)

    def keep_received(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Cache the full blocks that arrived for a granted request, which is about to be aborted.

        Args:
            num_tokens: whose KV is complete, whatever happened to the others.

        Returns:
            Its granted blocks that are not complete.
        """
        assert num_tokens <= request.num_initial_tokens
        self._cache_up_to(request, num_tokens)
        return self.blocks_to_receive(request).block_ids

    def num_tokens_to_grant(self, request: Request) -> int:
        """Tokens up to the end of the decode block, the one behind the prompt's last block."""
        num_blocks = -(-request.num_initial_tokens // self.block_size) + 1
        room = min(num_blocks * self.block_size, request.max_num_tokens)
        return max(room, request.num_initial_tokens)

    def handoff_indices(self, num_prompt_tokens: int) -> list[int]:
        """Places in ``block_ids`` of the blocks that a node needs to go on after a prompt.

        What slid out before the prompt's end is not among them. The same on every node with this
        model and block size, so that two nodes need to name no places to each other.
        """
        num_blocks = -(-num_prompt_tokens // self.block_size)
        return self._coordinator.kept_indices(num_prompt_tokens, num_blocks)

    def free_slid_out(self, request: Request) -> None:
        """Drop the blocks that no layer looks at any more; those without a name stay without."""
        self._coordinator.free_slid_out(request.block_ids, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        """Drop the request's references, tail blocks first: a prefix is worth keeping longest."""
        block_ids: Iterable[int] = reversed(request.block_ids)
        if self._null_block is not None:
            block_ids = (b for b in block_ids if b != self._null_block)
        self.block_pool.release(block_ids)
        request.block_ids = []
        request.num_cached_blocks = 0
