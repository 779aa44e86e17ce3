"""KVCacheManager: the blocks of each request. Knows block ids and token counts, no tensor."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.request import Request


class KVCacheManager:
    """Gives requests the blocks that their tokens need, and takes them back.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

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

    def free(self, request: Request) -> None:
        """Drop the request's references, tail blocks first: a prefix is worth keeping longest."""
        self.block_pool.release(reversed(request.block_ids))
        request.block_ids.clear()
