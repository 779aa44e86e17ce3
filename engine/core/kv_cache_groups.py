"""KV cache groups: layers that keep the same, of the same tokens, share a block table.

    layers of a model            s s f s s f        s: sliding window, f: full attention
    groups of two layers   0:        f     f        keeps all blocks
                           1:    s s                drops what slid out
                           2:          s s          the same

Blocks of all groups are of equal bytes, so that any free block serves any group; a group that needs
less pads its own. Attention decides how large they are, and states fill them:

    layers of a hybrid           m m m f m m m f    m: a state (Mamba2), f: full attention
    block of many tokens   0:          f       f    as many tokens as take the bytes of
                           1:    m m m              so many states
                           2:            m m m

Refuses to know: blocks, requests, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.api.errors import ConfigError
from baton.kv_layers import LayerKV, PagedKV, StateKV

DEFAULT_BLOCK_SIZE = 16
# Each group of attention costs its own block table and its own plan in every step; one of states
# its block table alone.
MAX_GROUPS = 8
MAX_GROUPS_WITH_STATES = 16

# Bytes that a layer keeps in a block of so many tokens.
LayerBytes = Callable[[LayerKV, int], int]


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind.

    Attributes:
        kv: what each of them keeps.
        layers: indices into the model's layers, in order; the place in here is the place in a
            block.
    """

    kv: LayerKV
    layers: tuple[int, ...]


def group_layers(
    kv_layers: Sequence[LayerKV], block_size: int, layer_bytes: LayerBytes
) -> tuple[KVCacheGroup, ...]:
    """Cut a model's layers into groups; those that keep most come first.

    Blocks of a short group have room that no layer uses. How much of attention a block holds is
    chosen for the least of it among layers that keep most, then for the least of it, then for the
    fewest groups. Where even then the room of more layers is empty than is saved in a long
    sequence, all layers are one group of full attention, if they differ in windows alone. Of states
    a block holds as many as fit.

    Args:
        kv_layers: what each layer keeps.
        block_size: tokens of a block.
        layer_bytes: tells how much that is.

    Raises:
        ConfigError: a block of so many tokens is too small for the states.
    """
    groups = _cut(kv_layers, block_size, layer_bytes)
    if groups is None:
        enough = smallest_block_size(kv_layers, layer_bytes)
        raise ConfigError(
            f"block_size: {block_size} tokens of this model's attention take fewer bytes than its "
            f"states need; at least {enough}, got {block_size}"
        )
    return groups


def smallest_block_size(kv_layers: Sequence[LayerKV], layer_bytes: LayerBytes) -> int:
    """The fewest tokens, in steps of 16, whose blocks hold a model's states in few enough groups.

    Small blocks keep short sequences small, and let more prefixes be found. 16 without states.
    """
    block_size = DEFAULT_BLOCK_SIZE
    while _cut(kv_layers, block_size, layer_bytes) is None:
        block_size += DEFAULT_BLOCK_SIZE
    return block_size


_Kind = tuple[LayerKV, list[int]]


def _cut(
    kv_layers: Sequence[LayerKV], block_size: int, layer_bytes: LayerBytes
) -> tuple[KVCacheGroup, ...] | None:
    """The groups, or None where the states of a model would be too many of them."""
    by_kv: dict[LayerKV, list[int]] = {}
    for layer, kv in enumerate(kv_layers):
        by_kv.setdefault(kv, []).append(layer)
    kinds = sorted(by_kv.items(), key=lambda kind: _keeps(kind[0]))
    attention = [kind for kind in kinds if not isinstance(kind[0], StateKV)]
    states = kinds[len(attention) :]
    if not attention:
        raise ConfigError("a model of which no layer attends is not supported")
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
    """Sort by how much is kept, those that keep most first; states last."""
    retained = kv.retained_tokens
    return isinstance(kv, StateKV), retained is not None, -(retained or 0)


def _joined(attention: Sequence[_Kind]) -> _Kind:
    """All layers as one kind of full attention."""
    widest = attention[0][0]
    assert isinstance(widest, PagedKV)
    layers = sorted(layer for _, layers in attention for layer in layers)
    return replace(widest, sliding_window=None), layers


def _attention_block_bytes(
    attention: Sequence[_Kind], block_size: int, layer_bytes: LayerBytes
) -> int | None:
    """Bytes of a block, or None when groups are not worth their empty room.

    Args:
        attention: kinds of layers, and those of each; those that keep most first.
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
    best: tuple[int, int, int, int] | None = None  # the last one are the bytes
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
