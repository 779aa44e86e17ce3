"""Block numbers: ranges of layers, runs of neighbouring blocks, and checks of ids and layers.

Refuses to know: memory, the content of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

LayerRange = tuple[int, int]  # from the first layer up to, not including, the second


def layer_groups(num_layers: int, num_groups: int) -> tuple[LayerRange, ...]:
    """Cut layers into at most ``num_groups`` nearly equal ranges; larger ones come first.

    The push of the last range cannot hide behind a layer's computation, so that range is smallest.
    """
    num_groups = min(num_groups, num_layers)
    size, larger = divmod(num_layers, num_groups)
    ends = [size * (index + 1) + min(index + 1, larger) for index in range(num_groups)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def count_runs(local: Sequence[int], remote: Sequence[int]) -> int:
    """Count the memory ranges in a copy of blocks ``local[i]`` to ``remote[i]``; blocks that are
    neighbours on both sides share a range.
    """
    steps = zip(pairwise(local), pairwise(remote), strict=True)
    num_breaks = sum(b - a != 1 or d - c != 1 for (a, b), (c, d) in steps)
    return num_breaks + 1 if local else 0


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError unless all ids are blocks: a bad address can kill the receiver."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        raise ValueError(f"block ids must be 0 to {num_blocks - 1}, got {list(block_ids)[:8]}")


def check_layers(layers: LayerRange | None, num_layers: int) -> None:
    """Raise ValueError unless these layers exist: a bad address can kill the receiver."""
    if layers is not None and not 0 <= layers[0] < layers[1] <= num_layers:
        raise ValueError(f"layers: must be a range within 0 to {num_layers}, got {layers}")
