"""Extents: blocks that follow each other in memory, so that a transfer copies few, long ranges.

    first free blocks    40 41 7 90 8 9 42 ...      wanted: 5
    runs among them      [7 8 9] [40 41 42] [90]    given:  7 8 9, 40 41

Refuses to know: what blocks hold, and in what state they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# How many times the wanted number of blocks is looked at: the more, the longer the extents, and
# the further from the order in which blocks would go.
WINDOW_FACTOR = 8
MAX_EXTRA = 2048  # many blocks find long runs among themselves
# More extents than a few, shorter than so many blocks, cost a transfer more than new memory does.
FEW_EXTENTS, SHORT_EXTENT = 2, 8


def window_size(num_blocks: int) -> int:
    """How many of the first free blocks to choose among."""
    return min(num_blocks * WINDOW_FACTOR, num_blocks + MAX_EXTRA)


def choose_extents(candidates: Sequence[int], num_blocks: int) -> list[int]:
    """``num_blocks`` of the candidates, in the fewest runs of consecutive ids that there can be.

    Takes the longest runs, and for what is left the shortest run that has room for it.

    Args:
        candidates: block ids, all different, at least ``num_blocks``, at least one.
    """
    ordered = np.sort(np.array(candidates, dtype=np.int64))
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ordered) != 1) + 1))
    lengths = np.diff(starts, append=len(ordered))
    longest_first = np.argsort(-lengths, kind="stable")  # of equal ones the lower ids come first
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
    """Return how many runs of consecutive ids these are, one at least."""
    return 1 + int(np.count_nonzero(np.diff(block_ids) != 1))
