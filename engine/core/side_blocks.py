"""SideBlocks: one limit for all blocks that transfers of cached KV withhold from requests.

    reads of files      blocks that are being filled, and cached blocks before them
    fetches             blocks that other nodes write, or may still write, and cached blocks before
    shares              cached blocks that are being sent

Each kind of transfer lists the blocks to which it has references. A block counts if no request has
a reference to the block. Refuses to know: what a transfer does with its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from engine.core.block_pool import BlockPool

# Maximum share of all blocks that all transfers together may withhold from requests.
MAX_SHARE = 0.5


class SideBlocks:
    """The common limit of one engine's transfers. Used on the engine's thread.

    Args:
        pool: owner of the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lists: list[Callable[[], Iterable[int]]] = []

    def add_holder(self, list_blocks: Callable[[], Iterable[int]]) -> None:
        """Add a kind of transfer.

        Args:
            list_blocks: returns the block of each reference that transfers of this kind have now.
        """
        self._lists.append(list_blocks)

    @property
    def num_held(self) -> int:
        """Number of blocks that would be free now if there were no transfers."""
        references: Counter[int] = Counter()
        for list_blocks in self._lists:
            references.update(list_blocks())
        return self._pool.num_free_among(references, references)

    @property
    def num_left(self) -> int:
        """Number of further blocks that transfers may withhold; 0 or less means none."""
        return int(self._pool.num_blocks * MAX_SHARE) - self.num_held
