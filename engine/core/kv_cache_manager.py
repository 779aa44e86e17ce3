"""KVCacheManager: the blocks of each request. Refuses to know: tensors.

A logical block is the KV of ``block_size`` tokens in all groups of layers, hence ``num_groups``
blocks of the pool; ``Request.block_ids`` lists these blocks
(`engine/core/kv_cache_coordinator.py`). The null block, which is never written, replaces blocks
that slid out of a group's attention window.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash, BlockHasher
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_coordinator import KVCacheCoordinator
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class GrantedBlocks:
    """The blocks that a remote node writes for a parked request.

    Attributes:
        first_block: number of leading blocks of the hand-off that are already cached here.
        block_ids: ids of the hand-off's other blocks, in order, which the remote node writes.
        groups: KV cache group of each block of the hand-off, with cached ones; empty: one group.
    """

    first_block: int
    block_ids: tuple[int, ...]
    groups: tuple[int, ...] = ()


class KVCacheManager:
    """Allocates blocks for the tokens of requests, and frees them.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
        sliding_windows: window of each KV cache group, in tokens; None: full attention.
        hasher: computes block hashes for the prefix cache; None: no prefix cache.
        record_events: whether to record the prefix cache's stored and removed contents.

    Attributes:
        coordinator: the KV cache groups, which find and keep cached blocks.
        hasher: computes hashes in the current namespace; None: no prefix cache.
        slides: whether any group has a window, so that `free_slid_out` can free blocks.
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
        self.coordinator = KVCacheCoordinator(sliding_windows, block_size, self.block_pool)
        self._null_block = self.coordinator.null_block
        self.slides = self._null_block is not None
        self.hasher = hasher

    def rename(self, namespace: bytes) -> None:
        """Empty the prefix cache, and compute later hashes in another namespace.

        Args:
            namespace: digest of what KV depends on, which later hashes include; see
                `cache_namespace`.
        """
        self.block_pool.reset_prefix_cache()
        if self.hasher is not None:
            self.hasher = self.hasher.in_namespace(namespace)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks, over all groups, that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def num_tokens_held(self, request: Request) -> int:
        """Return how many tokens the blocks of a request have room for."""
        return len(request.block_ids) // self.num_groups * self.block_size

    # ------------------------------------------------------------------ prefix cache

    def find_cached_blocks(self, request: Request) -> list[int]:
        """Return the blocks of a request's longest cached prefix, without taking references.

        The prefix never includes the last known token, which must be computed for its logits. The
        prefix is empty if the request asks for prompt logprobs or for pooling that needs hidden
        states of the whole prompt.
        """
        if request.needs_all_rows:
            return []
        return self._longest_hit(request, request.num_tokens - 1)

    def num_usable_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a new request would be found in the prefix cache now.

        The last token must be computed for its logits and is not counted, unlike in
        `find_initial_prefix`. Layers with a window add little to the count: only their last window
        is cached.
        """
        return len(self.find_cached_blocks(request)) // self.num_groups * self.block_size

    def _longest_hit(self, request: Request, num_tokens: int) -> list[int]:
        """Return the cached blocks of a request's first ``num_tokens`` tokens, interleaved over
        groups.
        """
        if self.hasher is None:
            return []
        self.extend_hashes(request, self.hasher)
        hashes = request.block_hashes[: num_tokens // self.block_size]
        return self.coordinator.longest_hit(hashes, request.cache_class)

    def allocate_with_prefix(self, request: Request, num_reserved: int = 0) -> int | None:
        """Give a request without blocks its cached prefix, and blocks for all other known tokens.

        Args:
            num_reserved: number of blocks that must stay free afterwards.

        Returns:
            Number of tokens in the prefix; None, with nothing changed, if too few blocks are free.
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
        """Share the full blocks of a request's prompt with ``sibling``, which has no blocks.

        The block with the prompt's last token is not shared: the sibling needs its logits.
        """
        num_blocks = (request.num_prompt_tokens - 1) // self.block_size
        null_block = self._null_block
        sibling.block_ids = request.block_ids[: num_blocks * self.num_groups]
        self.block_pool.hold(b for b in sibling.block_ids if b != null_block)
        sibling.block_hashes = request.block_hashes[:num_blocks]
        sibling.num_cached_blocks = min(request.num_cached_blocks, num_blocks)
        sibling.num_computed_tokens = num_blocks * self.block_size
        sibling.num_hit_tokens = sibling.num_computed_tokens
        sibling.cache_class = request.cache_class

    def cache_blocks(self, request: Request, cache_class: int = 0) -> None:
        """Enter the request's full, computed blocks into the prefix cache.

        Args:
            cache_class: class of the newly cached blocks; see `block_pool.py`.
        """
        self._cache_up_to(request, request.num_computed_tokens, cache_class)

    def _cache_up_to(self, request: Request, num_tokens: int, cache_class: int = 0) -> None:
        if self.hasher is None:
            return
        num_full = num_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full <= first:
            return
        self.extend_hashes(request, self.hasher)
        hashes = request.block_hashes
        self.coordinator.cache(request.block_ids, hashes, first, num_full, cache_class=cache_class)
        request.num_cached_blocks = num_full

    def extend_hashes(self, request: Request, hasher: BlockHasher) -> None:
        """Append the hashes of a request's full blocks that are not computed yet."""
        spans = request.image_spans
        hasher.extend(request.block_hashes, request.token_ids, request.extra_keys, spans)

    def find_initial_prefix(self, request: Request) -> tuple[int, list[BlockHash]]:
        """Find the cached prefix of a parked request's initial tokens, without taking references.

        The last initial token may be part of the prefix.

        Returns:
            The number of cached tokens, and the hashes (if any) of the full blocks after them.
        """
        cached = self._longest_hit(request, request.num_initial_tokens)
        num_blocks = len(cached) // self.num_groups
        num_full = request.num_initial_tokens // self.block_size
        return num_blocks * self.block_size, request.block_hashes[num_blocks:num_full]

    # ------------------------------------------------------------------ blocks

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate blocks until the request has room for ``num_tokens`` tokens.

        Returns:
            The ids of the added blocks; None if too few blocks are free, and nothing was changed.
        """
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        new_block_ids = self.block_pool.allocate(missing)
        if new_block_ids is not None:
            request.block_ids.extend(new_block_ids)
        return new_block_ids

    def allocate_for_handoff(self, request: Request, num_tokens: int) -> bool:
        """Give a request without blocks its cached prefix, and blocks for the rest.

        The prefix may include the last initial token: the remote node samples the next one.

        Args:
            num_tokens: tokens to have room for, at least all initial tokens. Blocks that slide out
                before the end of the initial tokens are not allocated.

        Returns:
            False, with nothing changed, if too few blocks are free.
        """
        assert not request.block_ids
        num_initial_blocks = self.num_blocks_for(request.num_initial_tokens)
        places = self.handoff_places(request.num_initial_tokens)
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
        """Return the blocks of a request's hand-off that a remote node must write."""
        places = self.handoff_places(request.num_initial_tokens)
        first = bisect.bisect_left(places, request.num_cached_blocks * self.num_groups)
        block_ids = tuple(request.block_ids[place] for place in places[first:])
        several = self.num_groups > 1
        groups = tuple(place % self.num_groups for place in places) if several else ()
        return GrantedBlocks(first, block_ids, groups)

    def keep_received(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """Cache the full blocks that arrived for a granted request that is about to be aborted.

        Args:
            num_tokens: leading tokens whose KV is complete.

        Returns:
            The granted blocks that are not complete.
        """
        assert num_tokens <= request.num_initial_tokens
        self._cache_up_to(request, num_tokens)
        return self.blocks_to_receive(request).block_ids

    def num_tokens_to_grant(self, request: Request) -> int:
        """Return the number of tokens that fit into a grant: into the prompt's blocks and one more.

        The additional block is for the first output tokens.
        """
        num_blocks = -(-request.num_initial_tokens // self.block_size) + 1
        room = min(num_blocks * self.block_size, request.max_num_tokens)
        return max(room, request.num_initial_tokens)

    def handoff_places(self, num_prompt_tokens: int) -> list[int]:
        """Return the places in ``block_ids`` of the blocks that a hand-off transfers.

        Blocks outside the attention window at the prompt's end are not transferred. Nodes need not
        send each other the places: equal models and block sizes give equal places.
        """
        num_blocks = -(-num_prompt_tokens // self.block_size)
        return self.coordinator.kept_places(num_prompt_tokens, num_blocks)

    def free_slid_out(self, request: Request) -> None:
        """Release those of a request's blocks that slid out of their groups' windows."""
        self.coordinator.free_slid_out(request.block_ids, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        """Drop the request's references, last blocks first: prefixes stay cached longest."""
        block_ids: Iterable[int] = reversed(request.block_ids)
        if self._null_block is not None:
            block_ids = (b for b in block_ids if b != self._null_block)
        self.block_pool.release(block_ids)
        request.block_ids = []
        request.num_cached_blocks = 0
