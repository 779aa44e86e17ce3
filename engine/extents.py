"""Extents: blocks that follow each other in memory, so that a transfer copies few, long ranges.

    oldest free blocks   40 41 7 90 8 9 42 ...      wanted: 5
    runs among them      [7 8 9] [40 41 42] [90]    given:  40 41 42, 7 8

Refuses to know: what blocks hold, and in what state they are.
"""

from __future__ import annotations

from collections.abc import Sequence

# How many times the wanted number of blocks is looked at: the more, the longer the extents, and
# the further from "what was freed longest ago goes first".
WINDOW_FACTOR = 8


def choose_extents(candidates: Sequence[int], num_blocks: int) -> list[int]:
    """``num_blocks`` of the candidates, in few runs of consecutive ids.

    Takes the longest runs, and for what is left the shortest run that has room for it. Sorts the
    candidates; nothing else is more than linear in them.

    Args:
        candidates: block ids, all different, at least ``num_blocks``.
    """
    runs = _runs(candidates)
    runs.sort(key=len)  # stable: of equal ones the lower ids come first
    chosen: list[int] = []
    fits = None
    while len(chosen) < num_blocks:
        missing = num_blocks - len(chosen)
        while runs and len(runs[-1]) >= missing:
            fits = runs.pop()
        if fits is not None:
            chosen += fits[:missing]
            break
        chosen += runs.pop()
    return chosen


def _runs(block_ids: Sequence[int]) -> list[range]:
    """Maximal runs of consecutive ids, ascending."""
    ordered = sorted(block_ids)
    runs = []
    start = previous = ordered[0]
    for block_id in ordered[1:]:
        if block_id != previous + 1:
            runs.append(range(start, previous + 1))
            start = block_id
        previous = block_id
    runs.append(range(start, previous + 1))
    return runs
