"""KV cache groups: layers that need the same tokens share a block table.

    layers of a model            s s f s s f        s: sliding window, f: full attention
    groups of two layers   0:        f     f        keeps all blocks
                           1:    s s                drops what slid out
                           2:          s s          the same

All groups have the same number of layers, so that a block is as large in one as in another and any
free block serves any group. Refuses to know: blocks, requests, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Each group costs its own block table and its own plan of attention in every step.
MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind.

    Attributes:
        sliding_window: tokens, itself included, that a token looks back at; None: all of them.
        layers: indices into the model's layers, in order; the place in here is the place in a
            block.
    """

    sliding_window: int | None
    layers: tuple[int, ...]


def group_layers(sliding_windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """Cut a model's layers into groups of equal size; those that keep most come first.

    Blocks of a short group have room that no layer uses. The size is chosen for the least of it
    among layers that keep most, then for the least of it, then for the fewest groups. Where even
    then the room of more layers is empty than is saved in a long sequence, all layers are one group
    of full attention.

    Args:
        sliding_windows: of each layer; None: full attention.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        by_window.setdefault(window, []).append(layer)
    kinds = sorted(by_window.items(), key=lambda kind: (kind[0] is not None, -(kind[0] or 0)))
    counts = [len(layers) for _, layers in kinds]
    size = _group_size(counts)
    if size is None:
        return (KVCacheGroup(None, tuple(range(len(sliding_windows)))),)
    return tuple(
        KVCacheGroup(window, tuple(layers[start : start + size]))
        for window, layers in kinds
        for start in range(0, len(layers), size)
    )


def _group_size(counts: Sequence[int]) -> int | None:
    """Layers per group, or None when groups are not worth their empty layers.

    Args:
        counts: layers of each kind; of those that keep most first.
    """
    if len(counts) == 1:
        return counts[0]
    best: tuple[int, int, int, int] | None = None  # the last one is the size
    for size in range(1, max(counts) + 1):
        num_groups = sum(-(-count // size) for count in counts)
        if num_groups > MAX_GROUPS:
            continue
        num_empty = num_groups * size - sum(counts)
        num_empty_of_first = -counts[0] % size
        if num_empty + num_empty_of_first > sum(counts[1:]):
            continue
        candidate = (num_empty_of_first, num_empty, num_groups, size)
        best = candidate if best is None else min(best, candidate)
    return None if best is None else best[-1]
