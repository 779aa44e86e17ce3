"""SideBlocks: bounds the blocks that transfers of cached KV keep from requests, all kinds together.

    reads of files      blocks that are being filled
    fetches             blocks that other nodes fill, or may still write
    shares              cached blocks that are being sent, and would be free otherwise

Each kind counts its own blocks; this object adds the counts. Refuses to know: which blocks.
"""

from __future__ import annotations

from collections.abc import Callable

# Largest part of all blocks that transfers may keep together; requests have the rest.
MAX_SHARE = 0.5


class SideBlocks:
    """The common budget of one engine's transfers. Used on the engine's thread.

    Args:
        num_blocks: number of all blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._counts: list[Callable[[], int]] = []

    def add_holder(self, count: Callable[[], int]) -> None:
        """Add a kind of transfers.

        Args:
            count: returns how many blocks the transfers of this kind keep from requests now.
        """
        self._counts.append(count)

    @property
    def num_held(self) -> int:
        """Number of blocks that transfers keep from requests now."""
        return sum(count() for count in self._counts)

    @property
    def num_left(self) -> int:
        """Number of further blocks that transfers may keep; 0 or less: none."""
        return int(self._num_blocks * MAX_SHARE) - self.num_held
