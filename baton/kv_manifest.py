"""KVManifest: what lies in a unit of KV, and which rank writes which bytes of it to whom.

A *unit* is what a node allocates and hands over: a block of one group of layers. A manifest
describes the units of a whole model, as if one rank held them. Each rank holds its part:

    unit          layers x [2, 8 heads, tokens, head_dim]         shard axis: heads
    4 ranks       heads 0 1 | 2 3 | 4 5 | 6 7
    16 ranks      head  0 | 0 | 1 | 1 | ...                       replicated, where there are more

Ranks may also be divided into stages, each of which has some of the layers. From two manifests
follows who writes what: `unit_copies`. Knows no memory, no address and no transport; refuses to
know: tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from baton.api.errors import TransferError

MAX_GROUPS = 64
MAX_AXES = 8
MAX_ARRAYS = 8
MAX_RANKS = 1024
MAX_STAGE_SIZE = 64  # as of --tensor-parallel-size: who writes what to whom takes their square
_MAX_UNIT_BYTES = 2**31
_ALIGNMENT = 16  # bytes

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}

# A peer may claim anything.
_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Layers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=4096)
]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]


class KVKind(enum.StrEnum):
    """What a group's units hold, and so how long they are kept."""

    PAGED = "paged"  # keys and values of so many tokens; all are kept
    WINDOW = "window"  # the same; what slid out of the window is let go
    LATENT = "latent"  # one vector for each of so many tokens; all are kept
    STATE = "state"  # what is behind the last of so many tokens; the newest is kept


class HandOffRule(enum.StrEnum):
    """When a unit may travel."""

    AS_IT_FILLS = "as it fills"  # a unit that is full never changes
    AT_BOUNDARY = "at a boundary"  # only the one that a prompt ends in, and whole


class KVOrder(enum.StrEnum):
    """What lies together in a unit."""

    LAYERS = "layers"  # a layer of all heads: what a layer has written travels as one range
    HEADS = "heads"  # a head of all layers: what a rank has travels as one range


class KVArray(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that one layer keeps in a unit.

    Attributes:
        shape: shape over all ranks together.
        dtype: name of the numbers' dtype.
        shard_axis: axis of ``shape`` along which ranks divide; None: each rank has all of it.
    """

    shape: _Shape
    dtype: _Word
    shard_axis: Annotated[int, msgspec.Meta(ge=0, lt=MAX_AXES)] | None = None

    def rank_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        if self.shard_axis is None:
            return self.shape
        first, end = shard(self.shape[self.shard_axis], rank, num_ranks)
        axis = self.shard_axis
        return (*self.shape[:axis], end - first, *self.shape[axis + 1 :])

    def num_bytes(self, rank: int = 0, num_ranks: int = 1) -> int:
        """Bytes of one rank's part."""
        return math.prod(self.rank_shape(rank, num_ranks)) * _DTYPE_BYTES[self.dtype]


def array_offsets(arrays: Sequence[KVArray], rank: int = 0, num_ranks: int = 1) -> list[int]:
    """Where each array begins in what a layer keeps, in bytes, and where the last one ends.

    Of several arrays each takes whole 16 bytes, which are what vector loads and views want.
    """
    offsets = [0]
    for array in arrays:
        num_bytes = array.num_bytes(rank, num_ranks)
        offsets.append(offsets[-1] + (num_bytes if len(arrays) == 1 else _round_up(num_bytes)))
    return offsets


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The layers that share a unit.

    Attributes:
        kind: what a unit holds.
        layers: the model's layers, in the order in which they lie in a unit.
        arrays: what each layer keeps in a unit, one behind the other; layer lies behind layer.
        num_places: for layers in a unit: there may be more than ``layers``, so that units of all
            groups are alike.
        block_size: tokens in a unit.
        scales: digest of what makes keys and values of the numbers; empty: they are.
        window: tokens that a token looks back at, itself included; 0: all of them.
        handoff: when a unit may travel.
        order: of layers and heads; by heads only where each layer keeps one array, whose second
            axis they are.
    """

    kind: KVKind
    layers: _Layers
    arrays: Annotated[tuple[KVArray, ...], msgspec.Meta(min_length=1, max_length=MAX_ARRAYS)]
    num_places: _Size
    block_size: _Size
    scales: _Word = ""
    window: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    handoff: HandOffRule = HandOffRule.AS_IT_FILLS
    order: KVOrder = KVOrder.LAYERS

    def layer_bytes(self, rank: int = 0, num_ranks: int = 1) -> int:
        """Bytes of one layer in one rank's part of a unit."""
        return array_offsets(self.arrays, rank, num_ranks)[-1]

    def unit_bytes(self, rank: int = 0, num_ranks: int = 1) -> int:
        """Bytes of one rank's part of a unit, without what pads it to the others'."""
        return self.num_places * self.layer_bytes(rank, num_ranks)


class KVManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's KV memory holds.

    Attributes:
        groups: all of them.
        num_ranks: workers that the node's model is divided over, stage by stage.
        num_stages: that its layers are divided over, each of so many ranks as the others.
    """

    groups: Annotated[tuple[KVGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1

    @property
    def layout(self) -> str:
        """A digest, equal where units mean the same, however many ranks they are divided over."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.groups))

    @property
    def layers_per_unit(self) -> int:
        """Parts of equal bytes that all units have: layers, where groups are alike, else one."""
        layouts = {(group.num_places, group.layer_bytes(), group.order) for group in self.groups}
        is_cut = len(layouts) == 1 and self.groups[0].order is KVOrder.LAYERS
        return self.groups[0].num_places if is_cut else 1

    @property
    def block_size(self) -> int:
        """Tokens in a unit."""
        return self.groups[0].block_size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage, which divide what each of its layers keeps."""
        return self.num_ranks // self.num_stages

    @property
    def leader(self) -> int:
        """The rank that speaks for the node: the first of the last stage."""
        return self.num_ranks - self.stage_size

    def places(self, group: KVGroup, stage: int) -> Sequence[int]:
        """Which of a group's places for layers a stage has, in the order in which they lie there.

        With one stage also those that no layer has, which make units of all groups alike.
        """
        if self.num_stages == 1:
            return range(group.num_places)
        own = range(*shard(sum(len(one.layers) for one in self.groups), stage, self.num_stages))
        return [place for place, layer in enumerate(group.layers) if layer in own]

    def num_places(self, stage: int) -> int:
        """For layers, in a unit of a stage; one at least. Of the group that has the most."""
        return max(1, *(len(self.places(group, stage)) for group in self.groups))

    def unit_bytes(self, rank: int = 0) -> int:
        """Bytes of one rank's part of a unit, the same in all groups: they share a pool.

        Units of a group that needs less are padded.
        """
        stage, place = divmod(rank, self.stage_size)
        num_bytes = max(
            max(1, len(self.places(group, stage))) * group.layer_bytes(place, self.stage_size)
            for group in self.groups
        )
        is_plain = all(group.arrays == self.groups[0].arrays for group in self.groups)
        return num_bytes if is_plain else _round_up(num_bytes)

    def check(self) -> None:
        """Raises TransferError for what no node of ours can have."""
        num_layers = sum(len(group.layers) for group in self.groups)
        if self.num_ranks % self.num_stages or self.num_stages > max(1, num_layers):
            raise TransferError(
                f"num_stages: {self.num_stages} of {self.num_ranks} ranks for {num_layers} layers"
            )
        if self.stage_size > MAX_STAGE_SIZE:
            raise TransferError(f"num_ranks: at most {MAX_STAGE_SIZE} of a stage")
        for index, group in enumerate(self.groups):
            for array in group.arrays:
                if array.dtype not in _DTYPE_BYTES:
                    raise TransferError(f"KV group {index}: dtype: unknown, got {array.dtype!r}")
                if array.shard_axis is not None and array.shard_axis >= len(array.shape):
                    raise TransferError(f"KV group {index}: shard_axis: no such axis")
            if group.unit_bytes() >= _MAX_UNIT_BYTES:
                raise TransferError(f"KV group {index}: arrays: of too many bytes")
            if group.order is KVOrder.HEADS and (
                len(group.arrays) > 1
                or len(group.arrays[0].shape) < 2
                or group.arrays[0].shard_axis not in (None, 1)
            ):
                raise TransferError(f"KV group {index}: order: no heads to be ordered by")
            if len(group.layers) > group.num_places:
                raise TransferError(f"KV group {index}: layers: more than there are places")


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

    def of_ranks(self, first_writer: int, first_reader: int) -> RankCopy:
        """Return this copy with both rank numbers shifted."""
        return self._replace(writer=self.writer + first_writer, reader=self.reader + first_reader)


def unit_copies(
    writers: KVManifest, readers: KVManifest, group: int, layers: tuple[int, int] | None = None
) -> tuple[RankCopy, ...]:
    """Which rank of a node writes which bytes of a unit of a group to which rank of another one.

    Each byte that a rank of the other node has is written once. Where several writers have what a
    reader wants, readers are spread over them.

    Args:
        writers: manifest of the writing node.
        readers: manifest of the reading node; equal but for ranks and stages.
        layers: the layers, counted as if one rank had the whole unit; None: all layers.
    """
    one = writers.groups[group]
    sizes = writers.stage_size, readers.stage_size
    wanted = range(*layers) if layers else range(one.num_places)
    sources = {
        place: (stage, index)
        for stage in range(writers.num_stages)
        for index, place in enumerate(writers.places(one, stage))
    }
    copies: list[RankCopy] = []
    for reader in range(readers.num_ranks):
        stage, reader_part = divmod(reader, sizes[1])
        moves = [
            (*sources[place], target)
            for target, place in enumerate(readers.places(one, stage))
            if place in wanted and place in sources
        ]
        if one.order is KVOrder.HEADS:
            found = _head_copies(writers, readers, one, moves, reader)
        else:
            found = (
                copy.of_ranks(writer_stage * sizes[0], stage * sizes[1])
                for writer_stage, source, target in moves
                for array in range(len(one.arrays))
                for copy in _array_copies(one, array, (source, target), reader_part, sizes)
            )
        for copy in found:
            _append(copies, copy)
    return tuple(copies)


def _head_copies(
    writers: KVManifest,
    readers: KVManifest,
    group: KVGroup,
    moves: Sequence[tuple[int, int, int]],
    reader: int,
) -> Iterator[RankCopy]:
    """What a reader gets of units that are ordered by heads, in the order of its bytes.

    Args:
        moves: stage and place of each layer at the writers, and its place at the reader.
    """
    array = group.arrays[0]
    inner = math.prod(array.shape[2:]) * _DTYPE_BYTES[array.dtype]
    stage, part = divmod(reader, readers.stage_size)
    per_layer, here = array.shape[0] * inner, readers.num_places(stage)
    first = 0 if array.shard_axis is None else shard(array.shape[1], part, readers.stage_size)[0]
    for writer, begin, end in _parts(array, part, writers.stage_size, readers.stage_size):
        start = 0
        if array.shard_axis is not None:
            start = shard(array.shape[1], writer, writers.stage_size)[0]
        for head in range(begin, end):
            for writer_stage, source, target in moves:
                there = writers.num_places(writer_stage)
                yield RankCopy(
                    writer_stage * writers.stage_size + writer,
                    reader,
                    ((head - start) * there + source) * per_layer,
                    ((head - first) * here + target) * per_layer,
                    per_layer,
                )


def rank_copies(
    group: KVGroup, num_writers: int, num_readers: int, layers: tuple[int, int] | None = None
) -> tuple[RankCopy, ...]:
    """Return copies between ranks that all have all layers of one group."""
    writers, readers = (
        KVManifest(groups=(group,), num_ranks=num_ranks) for num_ranks in (num_writers, num_readers)
    )
    return unit_copies(writers, readers, 0, layers)


def _append(copies: list[RankCopy], copy: RankCopy) -> None:
    """Add a copy; adjoining ones are one."""
    last = copies[-1] if copies else None
    if last and (last.writer, last.reader) == (copy.writer, copy.reader):
        ends = (last.source + last.num_bytes, last.target + last.num_bytes)
        if ends == (copy.source, copy.target):
            copies[-1] = last._replace(num_bytes=last.num_bytes + copy.num_bytes)
            return
    copies.append(copy)


def _array_copies(
    group: KVGroup, index: int, places: tuple[int, int], reader: int, sizes: tuple[int, int]
) -> Iterator[RankCopy]:
    """What a reader gets of one array of one layer, in the order of its bytes.

    Args:
        places: places of the layer in the writers' units and in the reader's.
        reader: rank in its stage.
        sizes: number of ranks in a writers' stage and in a readers' stage.
    """
    array = group.arrays[index]
    axis = 0 if array.shard_axis is None else array.shard_axis
    inner = math.prod(array.shape[axis + 1 :]) * _DTYPE_BYTES[array.dtype]
    parts = _parts(array, reader, *sizes)
    target, (start, end) = _place(group, index, places[1], reader, sizes[1])
    sides = [(*part, *_place(group, index, places[0], part[0], sizes[0])) for part in parts]
    for row in range(math.prod(array.shape[:axis])):
        for writer, first, last, source, (writer_start, writer_end) in sides:
            yield RankCopy(
                writer,
                reader,
                source + (row * (writer_end - writer_start) + first - writer_start) * inner,
                target + (row * (end - start) + first - start) * inner,
                (last - first) * inner,
            )


def _place(
    group: KVGroup, index: int, layer: int, rank: int, num_ranks: int
) -> tuple[int, tuple[int, int]]:
    """Where an array begins in a rank's part of a unit, and what of its shard axis is there."""
    array = group.arrays[index]
    before = array_offsets(group.arrays, rank, num_ranks)[index]
    if array.shard_axis is None:
        span = (0, array.shape[0])
    else:
        span = shard(array.shape[array.shard_axis], rank, num_ranks)
    return layer * group.layer_bytes(rank, num_ranks) + before, span


def _parts(
    array: KVArray, reader: int, num_writers: int, num_readers: int
) -> list[tuple[int, int, int]]:
    """(writer, first, end): runs of places of the shard axis that a reader gets of one writer."""
    if array.shard_axis is None:
        return [(reader % num_writers, 0, array.shape[0])]
    size = array.shape[array.shard_axis]
    parts: list[tuple[int, int, int]] = []
    for place in range(*shard(size, reader, num_readers)):
        holders = [w for w in range(num_writers) if place in range(*shard(size, w, num_writers))]
        writer = holders[reader % len(holders)]
        if parts and parts[-1][0] == writer:
            parts[-1] = (writer, parts[-1][1], place + 1)
        else:
            parts.append((writer, place, place + 1))
    return parts
