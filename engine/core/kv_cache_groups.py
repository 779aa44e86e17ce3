"""KV cache groups: layers that keep KV of the same tokens share a block table.

    layers of a model            s s f s s f        s: sliding window, f: full attention
    groups of two layers   0:        f     f        keeps all blocks
                           1:    s s                drops blocks that slid out
                           2:          s s          drops blocks that slid out

Blocks of all groups have the same size in bytes, so that any free block serves any group; a group
that needs fewer bytes pads its blocks. The attention layers decide this size, and as many states as
fit share a block:

    layers of a hybrid           m m m f m m m f    m: a state (Mamba2), f: full attention
    block of many tokens   0:          f       f    as many tokens as fill a block
                           1:    m m m              as many states as fit into a block
                           2:            m m m

Refuses to know: blocks, requests, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.api.errors import ConfigError
from baton.kv.layers import AnyKV, LayerKV, PagedKV, SharedKV, StateKV

DEFAULT_BLOCK_SIZE = 16
# Each attention group costs a block table and an attention plan in every step; a group of state
# layers costs only a block table.
MAX_GROUPS = 8
MAX_GROUPS_WITH_STATES = 16

# Type of functions that compute the bytes of one layer in a block of the given number of tokens.
LayerBytes = Callable[[LayerKV, int], int]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind, which share a block table.

    Attributes:
        kv: description of the KV or states that each of these layers keeps.
        layers: indices of the model's layers, in order; a layer's place in this tuple is its
            place in a block.
    """

    kv: LayerKV
    layers: tuple[int, ...]


def group_layers(
    kv_layers: Sequence[AnyKV], block_size: int, layer_bytes: LayerBytes
) -> tuple[KVCacheGroup, ...]:
    """Divide a model's layers into groups; the groups whose layers keep most tokens come first.

    A group with fewer layers than fit into a block leaves a part of each block unused. The number
    of attention layers per block is chosen for the smallest unused part in the blocks of the layers
    that keep most tokens; among equals, for the smallest unused part in all blocks, then for the
    fewest groups. If layers differ only in their windows, and the unused part exceeds the memory
    that windows save in a long sequence, all layers form one group of full attention. A block holds
    the states of as many state layers as fit. Layers that read other layers' KV are in no group.

    Args:
        kv_layers: description of each layer's KV or states.
        block_size: tokens per block.
        layer_bytes: computes the bytes that one layer stores in a block.

    Raises:
        ConfigError: a block of this many tokens is too small for the model's states.
    """
    groups = _cut(kv_layers, block_size, layer_bytes)
    if groups is None:
        enough = smallest_block_size(kv_layers, layer_bytes)
        raise ConfigError(
            f"block_size: {block_size} tokens of this model's attention take fewer bytes than its "
            f"states need; at least {enough}, got {block_size}"
        )
    return groups


def smallest_block_size(kv_layers: Sequence[AnyKV], layer_bytes: LayerBytes) -> int:
    """Return the smallest block size, a multiple of 16 tokens, that needs few enough state groups.

    Small blocks waste less memory on short sequences and raise the prefix cache's hit rate. For a
    model without state layers, the size is 16.
    """
    block_size = DEFAULT_BLOCK_SIZE
    while _cut(kv_layers, block_size, layer_bytes) is None:
        block_size += DEFAULT_BLOCK_SIZE
    return block_size


_Kind = tuple[LayerKV, list[int]]


def _cut(
    kv_layers: Sequence[AnyKV], block_size: int, layer_bytes: LayerBytes
) -> tuple[KVCacheGroup, ...] | None:
    """Divide the layers into groups; None if the state layers would need too many groups."""
    by_kv: dict[LayerKV, list[int]] = {}
    for layer, kv in enumerate(kv_layers):
        if not isinstance(kv, SharedKV):
            by_kv.setdefault(kv, []).append(layer)
    kinds = sorted(by_kv.items(), key=lambda kind: _keeps(kind[0]))
    attention = [kind for kind in kinds if not isinstance(kind[0], StateKV)]
    states = kinds[len(attention) :]
    if not attention:
        raise ConfigError("a model without attention layers is not supported")
    block_bytes = _attention_block_bytes(attention, block_size, layer_bytes)
    if block_bytes is None:
        attention = [_joined(attention)]
        block_bytes = len(attention[0][1]) * layer_bytes(attention[0][0], block_size)
    groups: list[KVCacheGroup] = []
    for kv, layers in (*attention, *states):
        size = block_bytes // layer_bytes(kv, block_size)
        if not size:
            return None
        groups += (
            KVCacheGroup(kv, tuple(layers[start : start + size]))
            for start in range(0, len(layers), size)
        )
    return tuple(groups) if not states or len(groups) <= MAX_GROUPS_WITH_STATES else None


def _keeps(kv: LayerKV) -> tuple[bool, bool, int]:
    """Return a key that sorts layers: those that keep most tokens first, states last."""
    retained = kv.retained_tokens
    return isinstance(kv, StateKV), retained is not None, -(retained or 0)


def _joined(attention: Sequence[_Kind]) -> _Kind:
    """Merge all kinds of attention layers into a single kind, with full attention."""
    widest = attention[0][0]
    assert isinstance(widest, PagedKV)
    layers = sorted(layer for _, layers in attention for layer in layers)
    return replace(widest, sliding_window=None), layers


def _attention_block_bytes(
    attention: Sequence[_Kind], block_size: int, layer_bytes: LayerBytes
) -> int | None:
    """Return the bytes of a block; None if all layers should form one group to save memory.

    Args:
        attention: attention layers by kind; the kinds that keep most tokens come first.
    """
    kinds = [(layer_bytes(kv, block_size), len(layers)) for kv, layers in attention]
    if len(kinds) == 1:
        return kinds[0][0] * kinds[0][1]
    can_join = len({(kv.num_kv_heads, kv.head_dim) if isinstance(kv, PagedKV) else kv
                    for kv, _ in attention}) == 1  # fmt: skip
    retained = attention[0][0].retained_tokens
    num_first = sum(kv.retained_tokens == retained for kv, _ in attention)
    total = sum(size * count for size, count in kinds)
    total_first = sum(size * count for size, count in kinds[:num_first])
    # Choose the block's bytes, the last entry of `candidate`, that leave least memory unused.
    best: tuple[int, int, int, int] | None = None
    smallest = max(size for size, _ in kinds)
    for block_bytes in sorted({size * n for size, count in kinds for n in range(1, count + 1)}):
        if block_bytes < smallest:
            continue
        counts = [-(-count // (block_bytes // size)) for size, count in kinds]
        if sum(counts) > MAX_GROUPS:
            continue
        num_empty = sum(counts) * block_bytes - total
        num_empty_of_first = sum(counts[:num_first]) * block_bytes - total_first
        if can_join and num_empty + num_empty_of_first > total - total_first:
            continue
        candidate = (num_empty_of_first, num_empty, sum(counts), block_bytes)
        best = candidate if best is None else min(best, candidate)
    if best is not None:
        return best[-1]
    if can_join:
        return None
    raise ConfigError(f"the layers of this model keep {len(kinds)} kinds of KV, which are too many")
