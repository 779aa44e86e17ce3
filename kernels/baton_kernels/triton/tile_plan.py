"""Divides a step's prompt chunks among GPU programs, on the host.

A tile has new tokens of one request, as many as fit, with all query heads of one KV head. If there
are only a few tiles with many keys, such as a short question after a long cached prefix, the tiles
are split along the keys, to fill the GPU; the parts are then merged::

    new tokens                keys 0 ..................................... seq_len
    tile 0  0 .. 32           | part 0 | part 1 | part 2 |\\
    tile 1  32 .. 64          | part 0 | part 1 | part 2    |\\

Refuses to know: devices, layers, dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ONLY_PART = -1
MIN_PART_KEYS = 512  # fewest keys of a part: with fewer, merging costs more than is saved


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The work of each program of a step for one KV head, and of each merge after them."""

    parts: npt.NDArray[np.int32]  # [n, 5]: request, first new token, first key, end key, slot
    # (-1: the tile has one part, which needs no merging); parts with the most keys come first
    merges: npt.NDArray[np.int32]  # [m, 4]: request, first new token, first slot, parts
    num_slots: int


def plan_tiles(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    tokens_per_tile: int,
    keys_per_step: int,
    block_size: int,
    num_programs: int,
    sliding_window: int | None,
    least_new: int = 2,
) -> TilePlan:
    """Divide requests with at least ``least_new`` new tokens into tiles, and tiles into parts.

    Plain loops are used, because most steps have few tiles, for which arrays are slower.

    Args:
        query_lens: number of new tokens of each request.
        seq_lens: number of all tokens of each request, including its new tokens.
        tokens_per_tile: maximum number of new tokens of a tile.
        keys_per_step: number of keys that a program reads at once; all parts but the last have a
            multiple of this.
        block_size: tokens per block of the KV cache; parts begin at a block.
        num_programs: number of programs per KV head that fill the GPU.
        sliding_window: number of newest keys that a query attends to; None: all.
        least_new: requests with fewer new tokens are left out; another kernel computes them.
    """
    tiles: list[tuple[int, int, int, int]] = []  # request, first new token, first key, end key
    for request, (num_new, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        earlier = seq_len - num_new
        for first_new in range(0, num_new if num_new >= least_new else 0, tokens_per_tile):
            start, end = 0, earlier + min(first_new + tokens_per_tile, num_new)
            if sliding_window is not None:
                start = max(earlier + first_new - sliding_window + 1, 0)
                start -= start % block_size
            tiles.append((request, first_new, start, end))

    multiple = math.lcm(keys_per_step, block_size)
    num_keys = sum(end - start for _, _, start, end in tiles)
    largest = max(-(-num_keys // num_programs), MIN_PART_KEYS)
    largest = -(-largest // multiple) * multiple
    parts: list[tuple[int, int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    num_slots = 0
    for request, first_new, start, end in tiles:
        num_parts = -(-(end - start) // largest)
        if num_parts == 1:
            parts.append((request, first_new, start, end, _ONLY_PART))
            continue
        even = -(-(end - start) // (num_parts * multiple)) * multiple
        for slot, first in enumerate(range(start, end, even), num_slots):
            parts.append((request, first_new, first, min(first + even, end), slot))
        # The loop has made exactly num_parts parts, because `even` is at most `largest`.
        merges.append((request, first_new, num_slots, num_parts))
        num_slots += num_parts
    parts.sort(key=lambda part: part[2] - part[3])
    return TilePlan(_rows(parts, 5), _rows(merges, 4), num_slots)


def most_parts(num_tokens: int, num_requests: int, tokens_per_tile: int, num_programs: int) -> int:
    """Return an upper limit for the number of parts (and merges and slots) of any plan."""
    return -(-num_tokens // tokens_per_tile) + num_requests + num_programs


def _rows(rows: Sequence[tuple[int, ...]], width: int) -> npt.NDArray[np.int32]:
    return np.array(rows, dtype=np.int32).reshape(-1, width)
