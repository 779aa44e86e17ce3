"""FileGroups: which blocks of each KV cache group a prefix needs, and which of them are in files.

    a prefix of 8 blocks       full attention   b0 b1 b2 b3 b4 b5 b6 b7
                               a window         -- -- -- -- -- b5 b6 b7
                               a state          -- -- -- -- -- -- -- b7

Each group has its own runs in its own folder. The run of a window or of a state ends where a
request ended. So a model with such a group can read only prefixes that end at such a place. Refuses
to know: files, threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash
from engine.core.block_pool import BlockPool
from engine.core.kv_cache_coordinator import group_suffix
from engine.core.kv_retention import longest_common_hit, make_retentions
from engine.kv_files.run_index import Run, plan_pieces

Found = Sequence[tuple[int, Run]]


@dataclass(frozen=True, slots=True)
class Lack:
    """The blocks that one group lacks for a prefix.

    Attributes:
        group: number of the group.
        first: place in the chain of the first block that the cache lacks.
        held_ids: ids of the cached blocks that the prefix needs before this place.
    """

    group: int
    first: int
    held_ids: Sequence[int]


class FileGroups:
    """The KV cache groups of one engine, as the file tier sees them.

    Args:
        pool: owner of the blocks.
        windows: window of each group, in tokens; None: full attention.
        block_size: tokens per block.

    Attributes:
        is_plain: whether there is only one group, with full attention. Then each part of a prefix
            can be used; otherwise only a whole prefix can.
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int | None], block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._retentions = make_retentions(windows, block_size)
        self._windows = tuple(windows)
        self.is_plain = self._windows == (None,)

    def __len__(self) -> int:
        return len(self._retentions)

    def has_window(self, group: int) -> bool:
        """Return whether a group keeps only the last blocks of a sequence."""
        return self._windows[group] is not None

    def num_expired(self, group: int, num_blocks: int) -> int:
        """Return how many leading blocks of a prefix of ``num_blocks`` the group does not need."""
        return self._retentions[group].num_expired_blocks(num_blocks * self._block_size)

    def count_reachable(
        self, chain: Sequence[BlockHash], found: Sequence[Found], first: int
    ) -> int:
        """Return how many leading blocks of a chain are in the cache or in files.

        Args:
            found: each group's runs that begin with a block of the chain, see `RunIndex.runs_of`.
            first: number of leading blocks that the cache has in all groups.
        """
        if self.is_plain:
            pieces = plan_pieces(found[0], chain, first)
            return pieces[-1].end if pieces else first
        finds = [
            _Find(_blocks_in(runs, chain), self._pool, group_suffix(group))
            for group, runs in enumerate(found)
        ]
        return len(longest_common_hit(self._retentions, chain, finds)[0])

    def num_stored(self, chain: Sequence[BlockHash], found: Sequence[Found]) -> int:
        """Return how many leading blocks of a chain are in files of all groups; ignores the cache.

        A run whose hashes are unknown counts only if its last block belongs to the chain.

        Args:
            found: as in `count_reachable`.
        """
        finds = [_Find(_blocks_in(runs, chain, only_known=True)) for runs in found]
        return len(longest_common_hit(self._retentions, chain, finds)[0])

    def list_lacks(self, chain: Sequence[BlockHash], end: int) -> list[Lack]:
        """Return for each group which of a prefix's ``end`` blocks the group's cache lacks."""
        found = []
        for group in range(len(self)):
            held_ids, place = [], self.num_expired(group, end)
            while place < end and (block_id := self.find_block(group, chain[place])) is not None:
                held_ids.append(block_id)
                place += 1
            found.append(Lack(group, place, held_ids))
        return found

    def find_block(self, group: int, block_hash: BlockHash) -> int | None:
        """Return the cached block of a group with this content, or None."""
        return self._pool.find(block_hash + group_suffix(group))


def _blocks_in(
    runs: Found, chain: Sequence[BlockHash], *, only_known: bool = False
) -> set[BlockHash]:
    """Return the blocks of a chain that are in runs.

    Args:
        only_known: whether to leave out runs whose number of blocks of the chain is unknown.
    """
    found: set[BlockHash] = set()
    for at, run in runs:
        size = run.num_equal(chain, at)
        if size is None:
            size = 0 if only_known else run.name.num_blocks
        found.update(chain[at : at + size])
    return found


@dataclass(frozen=True, slots=True)
class _Find:
    """A look-up of blocks in one group: -1 for blocks in files, else the cache's block.

    Attributes:
        pool: the cache; None: only files count.
        suffix: ending of the group's hashes in the cache.
    """

    in_files: set[BlockHash]
    pool: BlockPool | None = None
    suffix: bytes = b""

    def __call__(self, block_hash: BlockHash) -> int | None:
        if block_hash in self.in_files:
            return -1
        return None if self.pool is None else self.pool.find(block_hash + self.suffix)
