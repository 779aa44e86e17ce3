"""Extents: blocks that follow each other in memory, so that a transfer copies few, long ranges.

    first free blocks    40 41 7 90 8 9 42 ...      wanted: 5
    runs among them      [7 8 9] [40 41 42] [90]    given:  7 8 9, 40 41

Refuses to know: contents and states of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The number of free blocks to choose among, as a multiple of the wanted number. More candidates
# give longer extents, but stray further from the free list's order.
WINDOW_FACTOR = 8
MAX_EXTRA = 2048  # enough for long runs when many blocks are wanted
# More than `FEW_EXTENTS` extents, shorter than `SHORT_EXTENT` blocks, slow a transfer more than
# using new memory does.
FEW_EXTENTS, SHORT_EXTENT = 2, 8


def window_size(num_blocks: int) -> int:
    """Return how many of the first free blocks to choose among."""
    return min(num_blocks * WINDOW_FACTOR, num_blocks + MAX_EXTRA)


def choose_extents(candidates: Sequence[int], num_blocks: int) -> list[int]:
    """Choose ``num_blocks`` of the candidates, in the fewest possible runs of consecutive ids.

    Takes the longest runs, then the shortest run that has room for the rest.

    Args:
        candidates: different block ids, at least ``num_blocks`` and at least one.
    """
    ordered = np.sort(np.array(candidates, dtype=np.int64))
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ordered) != 1) + 1))
    lengths = np.diff(starts, append=len(ordered))
    longest_first = np.argsort(-lengths, kind="stable")  # ties: lower ids first
    lengths = lengths[longest_first]
    totals = np.cumsum(lengths)
    num_whole = int(np.searchsorted(totals, num_blocks))
    missing = num_blocks - (int(totals[num_whole - 1]) if num_whole else 0)
    shortest = int(np.searchsorted(-lengths, -missing, side="right")) - 1
    chosen: list[int] = []
    for run, length in [*((i, lengths[i]) for i in range(num_whole)), (shortest, missing)]:
        start = starts[longest_first[run]]
        chosen += ordered[start : start + length].tolist()
    return chosen


def count_extents(block_ids: Sequence[int]) -> int:
    """Return the number of runs of consecutive ids, at least one."""
    return 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
