"""KVManifest: what lies in a unit of KV, and which rank writes which bytes of it to whom.

A *unit* is what a node allocates and hands over: a block of one group of layers. A manifest
describes the units of a whole model, as if one rank held them. Each rank holds its part:

    unit          [layers, 2, 8 heads, tokens, head_dim]          shard axis: heads
    4 ranks       heads 0 1 | 2 3 | 4 5 | 6 7
    16 ranks      head  0 | 0 | 1 | 1 | ...                       replicated, where there are more

From the manifest and two numbers of ranks follows who writes what: `rank_copies`. Knows no memory,
no address and no transport; refuses to know: tensors.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from baton.api.errors import TransferError

MAX_GROUPS = 64
MAX_AXES = 8
MAX_RANKS = 1024
_MAX_UNIT_BYTES = 2**31

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}

# A peer may claim anything.
_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Layers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=4096)
]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(min_length=2, max_length=MAX_AXES)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]


class KVKind(enum.StrEnum):
    """What a group's units hold, and so how long they are kept."""

    PAGED = "paged"  # so many tokens; all are kept
    WINDOW = "window"  # so many tokens; what slid out of the window is let go


class HandOffRule(enum.StrEnum):
    """When a unit may travel."""

    AS_IT_FILLS = "as it fills"  # a unit that is full never changes


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The layers that share a unit.

    Attributes:
        kind: what a unit holds.
        layers: of the model, in the order in which they lie in a unit.
        shape: of one unit of all ranks together. The first axis is layers: there may be more places
            than ``layers``, so that units of all groups are alike.
        block_size: tokens in a unit.
        shard_axis: of ``shape``, along which ranks divide it; None: each rank has all of it.
        dtype: of its numbers, by name.
        scales: digest of what makes keys and values of the numbers; empty: they are.
        window: tokens that a token looks back at, itself included; 0: all of them.
        handoff: when a unit may travel.
    """

    kind: KVKind
    layers: _Layers
    shape: _Shape
    block_size: _Size
    shard_axis: Annotated[int, msgspec.Meta(ge=1, lt=MAX_AXES)] | None
    dtype: _Word
    scales: _Word = ""
    window: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    handoff: HandOffRule = HandOffRule.AS_IT_FILLS

    def rank_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part of a unit."""
        if self.shard_axis is None:
            return self.shape
        first, end = shard(self.shape[self.shard_axis], rank, num_ranks)
        axis = self.shard_axis
        return (*self.shape[:axis], end - first, *self.shape[axis + 1 :])

    def unit_bytes(self, rank: int, num_ranks: int) -> int:
        """Bytes of one rank's part of a unit."""
        return math.prod(self.rank_shape(rank, num_ranks)) * _DTYPE_BYTES[self.dtype]


class KVManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's KV memory holds.

    Attributes:
        groups: all of them.
        num_ranks: workers that the node's model is divided over.
    """

    groups: Annotated[tuple[KVGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1

    @property
    def layout(self) -> str:
        """A digest, equal where units mean the same, however many ranks they are divided over."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.groups))

    @property
    def layers_per_unit(self) -> int:
        """Places for layers in a unit, the same in all groups."""
        return self.groups[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a unit."""
        return self.groups[0].block_size

    def unit_bytes(self, rank: int = 0) -> int:
        """Bytes of one rank's part of a unit, the same in all groups: they share a pool."""
        return self.groups[0].unit_bytes(rank, self.num_ranks)

    def check(self) -> None:
        """Raises TransferError for what no node of ours can have."""
        for index, group in enumerate(self.groups):
            if group.dtype not in _DTYPE_BYTES:
                raise TransferError(f"KV group {index}: dtype: unknown, got {group.dtype!r}")
            if group.shard_axis is not None and group.shard_axis >= len(group.shape):
                raise TransferError(f"KV group {index}: shard_axis: no such axis")
            if math.prod(group.shape) * _DTYPE_BYTES[group.dtype] >= _MAX_UNIT_BYTES:
                raise TransferError(f"KV group {index}: shape: of too many bytes")
            if group.shape[0] != self.layers_per_unit or any(
                group.unit_bytes(0, ranks) != self.groups[0].unit_bytes(0, ranks)
                for ranks in {1, self.num_ranks}
            ):
                raise TransferError(f"KV group {index}: its units are not as large as the others'")


def difference(own: KVManifest, other: KVManifest) -> str:
    """Say in which field units differ, so that none can be copied; empty: in none.

    The number of ranks is no difference.
    """
    if len(own.groups) != len(other.groups):
        return f"{len(other.groups)} KV groups, not {len(own.groups)}"
    for index, (mine, theirs) in enumerate(zip(own.groups, other.groups, strict=True)):
        for field in KVGroup.__struct_fields__:
            if getattr(mine, field) != getattr(theirs, field):
                return (
                    f"KV group {index} with {field} {getattr(theirs, field)}, "
                    f"not {getattr(mine, field)}"
                )
    return ""


def shard(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """What a rank has of an axis: from the first place up to, not including, the second.

    Equal shares where they divide. With more ranks than places several have the same one.
    """
    first = rank * size // num_ranks
    return first, max(first + 1, (rank + 1) * size // num_ranks)


class RankCopy(NamedTuple):
    """One range of bytes that a rank of the sender writes into each unit of a rank of the receiver.

    Attributes:
        writer: rank of the sender.
        reader: rank of the receiver.
        source: where the range begins in the writer's part of a unit, in bytes.
        target: where in the reader's.
    """

    writer: int
    reader: int
    source: int
    target: int
    num_bytes: int


def rank_copies(
    group: KVGroup, num_writers: int, num_readers: int, layers: tuple[int, int] | None = None
) -> tuple[RankCopy, ...]:
    """Which rank writes which bytes of a unit to whom; each byte of each reader is written once.

    Where several writers have what a reader wants, readers are spread over them.

    Args:
        group: of both sides.
        layers: of a unit; None: all of it.
    """
    copies = [
        copy
        for reader in range(num_readers)
        for writer, first, end in _parts(group, reader, num_writers, num_readers)
        for copy in _ranges(group, (writer, num_writers), (reader, num_readers), first, end, layers)
    ]
    return tuple(copies)


def _parts(
    group: KVGroup, reader: int, num_writers: int, num_readers: int
) -> list[tuple[int, int, int]]:
    """(writer, first, end): runs of places of the shard axis that a reader gets of one writer."""
    if group.shard_axis is None:
        return [(reader % num_writers, 0, 0)]
    size = group.shape[group.shard_axis]
    parts: list[tuple[int, int, int]] = []
    for place in range(*shard(size, reader, num_readers)):
        holders = [w for w in range(num_writers) if place in range(*shard(size, w, num_writers))]
        writer = holders[reader % len(holders)]
        if parts and parts[-1][0] == writer:
            parts[-1] = (writer, parts[-1][1], place + 1)
        else:
            parts.append((writer, place, place + 1))
    return parts


def _ranges(
    group: KVGroup,
    writer: tuple[int, int],
    reader: tuple[int, int],
    first: int,
    end: int,
    layers: tuple[int, int] | None,
) -> list[RankCopy]:
    """The ranges of bytes of places ``first`` to ``end`` of the shard axis; adjoining ones as one.

    Args:
        writer: its rank, and how many there are; likewise ``reader``.
    """
    axis = 1 if group.shard_axis is None else group.shard_axis
    inner = math.prod(group.shape[axis + 1 :]) * _DTYPE_BYTES[group.dtype]
    if group.shard_axis is None:
        first, end = 0, group.shape[axis]
        starts, sizes = (0, 0), (end, end)
    else:
        spans = [shard(group.shape[axis], *side) for side in (writer, reader)]
        starts = (spans[0][0], spans[1][0])
        sizes = (spans[0][1] - spans[0][0], spans[1][1] - spans[1][0])
    per_layer = math.prod(group.shape[1:axis])
    first_layer, end_layer = layers or (0, group.shape[0])
    ranges: list[RankCopy] = []
    for row in range(first_layer * per_layer, end_layer * per_layer):
        source, target = (
            (row * size + first - start) * inner for start, size in zip(starts, sizes, strict=True)
        )
        last = ranges[-1] if ranges else None
        num_bytes = (end - first) * inner
        if last and (last.source + last.num_bytes, last.target + last.num_bytes) == (
            source,
            target,
        ):
            ranges[-1] = last._replace(num_bytes=last.num_bytes + num_bytes)
        else:
            ranges.append(RankCopy(writer[0], reader[0], source, target, num_bytes))
    return ranges
