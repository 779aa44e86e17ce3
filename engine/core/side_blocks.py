"""SideBlocks: one limit for all blocks that transfers of cached KV withhold from requests.

    reads of files      blocks that are being filled
    fetches             blocks that other nodes write, or may still write
    shares              cached blocks that are not free only because they are being sent

Each kind of transfer counts its own blocks; this object adds the counts. Refuses to know: which
blocks these are.
"""

from __future__ import annotations

from collections.abc import Callable

# Largest part of all blocks that all transfers together may withhold from requests.
MAX_SHARE = 0.5


class SideBlocks:
    """The common limit of one engine's transfers. Used on the engine's thread.

    Args:
        num_blocks: number of all blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._counts: list[Callable[[], int]] = []

    def add_holder(self, count: Callable[[], int]) -> None:
        """Add a kind of transfer.

        Args:
            count: returns how many blocks the transfers of this kind withhold from requests now.
        """
        self._counts.append(count)

    @property
    def num_held(self) -> int:
        """Number of blocks that transfers withhold from requests now."""
        return sum(count() for count in self._counts)

    @property
    def num_left(self) -> int:
        """Number of further blocks that transfers may withhold; 0 or less means none."""
        return int(self._num_blocks * MAX_SHARE) - self.num_held
