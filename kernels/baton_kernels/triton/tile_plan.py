"""How the host cuts a step of prompt chunks into the work of programs.

A tile is as many new tokens of one request as fit with all query heads of one KV head. Few tiles
with many keys, as a short question behind a long cached prefix makes them, are split along the
keys, so that the GPU is filled; the parts are merged afterwards::

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

Ints = npt.NDArray[np.int_]

MIN_PART_KEYS = 512  # splitting finer costs more in merging than it gains


@dataclass(frozen=True, slots=True)
class TilePlan:
    """All programs of one step and one KV head, and what has to be merged after them."""

    parts: npt.NDArray[np.int32]  # [n, 5]: request, first new token, first key, end key, slot
    # (-1: the only part of its tile, which needs no merging); those with the most keys first
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
) -> TilePlan:
    """Cut all requests with more than one new token.

    Args:
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request, the new ones included.
        tokens_per_tile: new tokens that a program takes at once.
        keys_per_step: keys that a program takes at once; parts but the last are multiples of it.
        block_size: tokens per block of the KV cache; parts begin with one.
        num_programs: what fills the GPU, per KV head.
        sliding_window: see ``AttentionBackend.run``.
    """
    lens = np.array(query_lens)
    tiles_of = np.where(lens > 1, -(-lens // tokens_per_tile), 0)  # [num_requests]
    request, index = _counted(tiles_of)  # [num_tiles] each, as all that follow
    first_new = index * tokens_per_tile
    earlier = (np.array(seq_lens) - lens)[request]
    ends = earlier + np.minimum(first_new + tokens_per_tile, lens[request])
    starts = np.zeros_like(ends)
    if sliding_window is not None:
        starts = np.maximum(earlier + first_new - sliding_window + 1, 0)
        starts -= starts % block_size
    num_keys = ends - starts

    multiple = math.lcm(keys_per_step, block_size)
    largest = max(-(-int(num_keys.sum()) // num_programs), MIN_PART_KEYS)
    parts_of = -(-num_keys // (-(-largest // multiple) * multiple))
    # No part of a tile is empty, as these are not longer than those.
    even = -(-num_keys // (parts_of * multiple)) * multiple
    is_split = parts_of > 1

    tile, index = _counted(parts_of)  # [num_parts] each
    first_key = starts[tile] + index * even[tile]
    end_key = np.minimum(first_key + even[tile], ends[tile])
    slot = np.where(is_split[tile], is_split[tile].cumsum() - 1, -1)
    parts = np.stack((request[tile], first_new[tile], first_key, end_key, slot), axis=1)
    order = np.argsort(first_key - end_key, kind="stable")

    slots_of = parts_of[is_split]  # [num_merges]
    first_slot = slots_of.cumsum() - slots_of
    merges = np.stack((request[is_split], first_new[is_split], first_slot, slots_of), axis=1)
    return TilePlan(
        parts[order].astype(np.int32), merges.astype(np.int32), num_slots=int(slots_of.sum())
    )


def _counted(counts: Ints) -> tuple[Ints, Ints]:
    """``([0] * counts[0] + [1] * counts[1] + .., [0, 1, .., counts[0] - 1, 0, 1, ..])``."""
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
