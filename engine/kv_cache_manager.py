"""KVCacheManager: the blocks of each request. Knows ids, hashes and token counts, no tensor."""

from __future__ import annotations

from baton.block_hash import BlockHasher
from engine.block_pool import BlockPool
from engine.kv_retention import FullAttention, KVRetention, SlidingWindow
from engine.request import Request


class KVCacheManager:
    """Gives requests the blocks that their tokens need, and takes them back.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
        sliding_window: tokens that any layer still looks at, when that is the same for all of
            them; None when a layer looks at everything.
        hasher: names blocks for the prefix cache; None switches it off.
        record_events: keep what the prefix cache stored and removed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        sliding_window: int | None = None,
        hasher: BlockHasher | None = None,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks, record_events=record_events)
        self._hasher = hasher
        self._retention: KVRetention = FullAttention()
        if sliding_window is not None:
            # What slid out is pointed at one block that nobody writes.
            null_block = self.block_pool.allocate(1)
            assert null_block is not None
            self._retention = SlidingWindow(sliding_window, block_size, null_block[0])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ prefix cache

    def find_cached_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix of a request, without taking them.

        The last known token is left out: it must be computed for its logits. Who wants logprobs of
        the prompt needs the logits of all of it, and finds nothing.
        """
        if self._hasher is None or request.wants_prompt_logprobs:
            return []
        self._hasher.extend(request.block_hashes, request.token_ids, request.extra_keys)
        num_usable = (request.num_tokens - 1) // self.block_size
        return self._retention.longest_hit(request.block_hashes[:num_usable], self.block_pool.find)

    def allocate_with_prefix(self, request: Request, spare: int = 0) -> int | None:
        """Give a request without blocks its cached prefix, and room for all its known tokens.

        Args:
            spare: blocks that must be left free after that.

        Returns:
            The tokens of the prefix, or None, with nothing changed, when too few blocks are free.
        """
        assert not request.block_ids
        cached = self.find_cached_blocks(request)
        num_new = self.num_blocks_for(request.num_tokens) - len(cached)
        pool = self.block_pool
        null_block = self._retention.null_block
        taken = [block_id for block_id in cached if block_id != null_block]
        if num_new + pool.num_free_among(taken) + spare > pool.num_free:
            return None
        pool.touch(taken)
        new_block_ids = pool.allocate(num_new)
        assert new_block_ids is not None
        request.block_ids = cached + new_block_ids
        request.num_cached_blocks = len(cached)
        return len(cached) * self.block_size

    def cache_blocks(self, request: Request) -> None:
        """Name the request's blocks that are full and computed, so that others can find them."""
        if self._hasher is None:
            return
        num_full = request.num_computed_tokens // self.block_size
        first = request.num_cached_blocks
        if num_full <= first:
            return
        self._hasher.extend(request.block_hashes, request.token_ids, request.extra_keys)
        hashes = request.block_hashes
        self.block_pool.cache(
            request.block_ids[first:num_full],
            hashes[first:num_full],
            hashes[first - 1] if first else None,
        )
        request.num_cached_blocks = num_full

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

    def free_slid_out(self, request: Request) -> None:
        """Drop the blocks that no layer looks at any more; those without a name stay without."""
        null_block = self._retention.null_block
        num_expired = self._retention.num_expired_blocks(request.num_computed_tokens)
        request.num_cached_blocks = max(request.num_cached_blocks, num_expired)
        index = num_expired - 1
        while index >= 0 and request.block_ids[index] != null_block:
            self.block_pool.release([request.block_ids[index]])
            assert null_block is not None
            request.block_ids[index] = null_block
            index -= 1

    def free(self, request: Request) -> None:
        """Drop the request's references, tail blocks first: a prefix is worth keeping longest."""
        null_block = self._retention.null_block
        self.block_pool.release(b for b in reversed(request.block_ids) if b != null_block)
        request.block_ids = []
        request.num_cached_blocks = 0
