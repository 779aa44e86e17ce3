"""KVManifest: the layout of a unit of KV, and the byte ranges that ranks of two nodes exchange.

A *unit* is what a node allocates and transfers: a block of one group of layers. A manifest
describes a whole model's units as if one rank held them. Each rank holds a part:

    unit          layers x [2, 8 heads, tokens, head_dim]         shard axis: heads
    4 ranks       heads 0 1 | 2 3 | 4 5 | 6 7
    16 ranks      head  0 | 0 | 1 | 1 | ...                       replicated: more ranks than heads

Ranks may also form pipeline stages, each of which has some of the layers. `unit_copies` derives the
copies between two nodes from their manifests. Knows neither memory nor addresses, transports or
tensors.
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
MAX_STAGE_SIZE = 64  # limit of --tensor-parallel-size: copies grow with its square
_MAX_UNIT_BYTES = 2**31
_ALIGNMENT = 16  # bytes

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}

# Limits of the values in a manifest, because a peer's manifest is not trusted.
_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Layers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...], msgspec.Meta(max_length=4096)
]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]


class KVKind(enum.StrEnum):
    """Kinds of content that a unit may have. The kind decides how long a unit is kept."""

    PAGED = "paged"  # keys and values of a block's tokens; all blocks are kept
    WINDOW = "window"  # keys and values; blocks outside the window are freed
    LATENT = "latent"  # one vector per token; all blocks are kept
    STATE = "state"  # the state after a block's last token; the newest state is kept
    ENCODING = "encoding"  # embeddings of an image's placeholders; no KV


class HandOffRule(enum.StrEnum):
    """Rules for when a unit may be transferred."""

    AS_IT_FILLS = "as it fills"  # each unit once it is full, because a full unit never changes
    AT_BOUNDARY = "at a boundary"  # only the whole unit in which a prompt ends is sent


class KVOrder(enum.StrEnum):
    """Orders of layers and heads within a unit: layer by layer, or head by head."""

    # All bytes of a layer are adjacent, so a layer is sent as one range once it is computed.
    LAYERS = "layers"
    # All bytes of a head, from all layers, are adjacent, so the heads of one rank are one range.
    HEADS = "heads"


class KVArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array that one layer keeps in a unit.

    Attributes:
        shape: shape over all ranks together.
        dtype: name of the dtype.
        shard_axis: axis of ``shape`` that ranks split; None: each rank has the whole array.
    """

    shape: _Shape
    dtype: _Word
    shard_axis: Annotated[int, msgspec.Meta(ge=0, lt=MAX_AXES)] | None = None

    def rank_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        if self.shard_axis is None:
            return self.shape
        first, end = shard(self.shape[self.shard_axis], rank, num_ranks)
        axis = self.shard_axis
        return (*self.shape[:axis], end - first, *self.shape[axis + 1 :])

    def num_bytes(self, rank: int = 0, num_ranks: int = 1) -> int:
        """Return the size of one rank's part in bytes."""
        return math.prod(self.rank_shape(rank, num_ranks)) * _DTYPE_BYTES[self.dtype]


def array_offsets(arrays: Sequence[KVArray], rank: int = 0, num_ranks: int = 1) -> list[int]:
    """Return the byte offsets of a layer's arrays, and the end of the last one.

    If a layer has several arrays, each is padded to a multiple of 16 bytes, because vector loads
    and views of other dtypes need aligned addresses.
    """
    offsets = [0]
    for array in arrays:
        num_bytes = array.num_bytes(rank, num_ranks)
        offsets.append(offsets[-1] + (num_bytes if len(arrays) == 1 else _round_up(num_bytes)))
    return offsets


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of layers that share units.

    Attributes:
        kind: kind of the units' contents.
        layers: indexes of the model's layers, in their order within a unit.
        arrays: arrays that each layer keeps in a unit, in order; layers follow one another.
        num_places: slots for layers in a unit; may exceed the number of layers, because the units
            of all groups have the same size.
        block_size: tokens per unit.
        scales: digest of the scales of quantized keys and values; empty: keys and values have no
            scales.
        window: tokens that a token attends to, the token itself included; 0: all.
        handoff: when a unit may be transferred.
        order: order of layers and heads. HEADS requires one array per layer whose second axis is
            the heads.
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
        """Return the size of one layer in one rank's part of a unit, in bytes."""
        return array_offsets(self.arrays, rank, num_ranks)[-1]

    def unit_bytes(self, rank: int = 0, num_ranks: int = 1) -> int:
        """Return the size of one rank's part of a unit, in bytes, without padding."""
        return self.num_places * self.layer_bytes(rank, num_ranks)


class KVManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a node's KV memory.

    Attributes:
        groups: all groups of layers.
        num_ranks: workers that share the node's model, stage by stage.
        num_stages: pipeline stages, each with equally many ranks.
        stage_layers: number of layers of each stage; empty: all stages have equally many layers.
    """

    groups: Annotated[tuple[KVGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    stage_layers: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()

    @property
    def layout(self) -> str:
        """Digest of the units' layout; does not depend on the number of ranks."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.groups))

    @property
    def layers_per_unit(self) -> int:
        """Number of equal parts of each unit: its layers if all groups are equal, else 1."""
        layouts = {(group.num_places, group.layer_bytes(), group.order) for group in self.groups}
        is_cut = len(layouts) == 1 and self.groups[0].order is KVOrder.LAYERS
        return self.groups[0].num_places if is_cut else 1

    @property
    def block_size(self) -> int:
        """Tokens per unit."""
        return self.groups[0].block_size

    @property
    def stage_size(self) -> int:
        """Number of ranks in one stage, which split each of its layers."""
        return self.num_ranks // self.num_stages

    @property
    def leader(self) -> int:
        """Rank that represents the node: the first rank of the last stage."""
        return self.num_ranks - self.stage_size

    def places(self, group: KVGroup, stage: int) -> Sequence[int]:
        """Return a group's layer slots in one stage, in order.

        If the model has only one stage, the result includes the unused slots. Unused slots pad the
        group's units to the size that all groups share.
        """
        if self.num_stages == 1:
            return range(group.num_places)
        num_layers = sum(len(one.layers) for one in self.groups)
        own = range(*stage_span(num_layers, stage, self.num_stages, self.stage_layers))
        return [place for place, layer in enumerate(group.layers) if layer in own]

    def num_places(self, stage: int) -> int:
        """Return the number of layer slots in a stage's units: the slots of the largest group."""
        return max(1, *(len(self.places(group, stage)) for group in self.groups))

    def unit_bytes(self, rank: int = 0) -> int:
        """Return the size of one rank's part of a unit, in bytes.

        All groups share one pool, so units of smaller groups are padded to the size of the largest.
        """
        stage, place = divmod(rank, self.stage_size)
        num_bytes = max(
            max(1, len(self.places(group, stage))) * group.layer_bytes(place, self.stage_size)
            for group in self.groups
        )
        is_plain = all(group.arrays == self.groups[0].arrays for group in self.groups)
        return num_bytes if is_plain else _round_up(num_bytes)

    @property
    def max_unit_bytes(self) -> int:
        """Return an upper bound of all ranks' `unit_bytes`, without a loop over ranks or layers."""
        return _round_up(max(group.unit_bytes() for group in self.groups))

    def check(self) -> None:
        """Raise TransferError for a manifest that no node can have."""
        num_layers = sum(len(group.layers) for group in self.groups)
        if self.num_ranks % self.num_stages or self.num_stages > max(1, num_layers):
            raise TransferError(
                f"num_stages: {self.num_stages} for {self.num_ranks} ranks, {num_layers} layers"
            )
        # Layers that read other layers' KV are in no group, but stages have them, too.
        num_known = max(num_layers, *(1 + max(group.layers, default=0) for group in self.groups))
        if self.stage_layers and (
            len(self.stage_layers) != self.num_stages or sum(self.stage_layers) < num_known
        ):
            raise TransferError(f"stage_layers: {self.stage_layers} do not fit {num_known} layers")
        if self.stage_size > MAX_STAGE_SIZE:
            raise TransferError(f"num_ranks: must be at most {MAX_STAGE_SIZE} per stage")
        for index, group in enumerate(self.groups):
            for array in group.arrays:
                if array.dtype not in _DTYPE_BYTES:
                    raise TransferError(f"KV group {index}: dtype: unknown, got {array.dtype!r}")
                if array.shard_axis is not None and array.shard_axis >= len(array.shape):
                    raise TransferError(f"KV group {index}: shard_axis: no such axis")
            if group.unit_bytes() >= _MAX_UNIT_BYTES:
                raise TransferError(f"KV group {index}: arrays: too many bytes")
            if group.order is KVOrder.HEADS and (
                len(group.arrays) > 1
                or len(group.arrays[0].shape) < 2
                or group.arrays[0].shard_axis not in (None, 1)
            ):
                raise TransferError(f"KV group {index}: order: heads need one array with heads")
            if len(group.layers) > group.num_places:
                raise TransferError(f"KV group {index}: layers: more than num_places")


def difference(own: KVManifest, other: KVManifest) -> str:
    """Return the first field whose values prevent copies between two nodes; empty if there is none.

    The numbers of ranks and stages may differ.
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
    """Return the range of an axis of length ``size`` that a rank has: first index and end.

    All ranges are equal if ``size`` is divisible by ``num_ranks``. If there are more ranks than
    indexes, several ranks share an index.
    """
    first = rank * size // num_ranks
    return first, max(first + 1, (rank + 1) * size // num_ranks)


def stage_span(
    num_layers: int, stage: int, num_stages: int, stage_layers: Sequence[int] = ()
) -> tuple[int, int]:
    """Return the range of layers that a pipeline stage has: first layer and end.

    Args:
        stage_layers: number of layers of each stage; empty: the numbers are as equal as possible.
    """
    if not stage_layers:
        return shard(num_layers, stage, num_stages)
    first = sum(stage_layers[:stage])
    return first, first + stage_layers[stage]


class RankCopy(NamedTuple):
    """A byte range that a rank of the sender writes in each unit of a rank of the receiver.

    Attributes:
        writer: rank of the sender.
        reader: rank of the receiver.
        source: offset of the range in the writer's part of a unit, in bytes.
        target: offset of the range in the reader's part of a unit, in bytes.
    """

    writer: int
    reader: int
    source: int
    target: int
    num_bytes: int

    def of_ranks(self, first_writer: int, first_reader: int) -> RankCopy:
        """Return this copy with ranks numbered over whole nodes, instead of within their stages.

        Args:
            first_writer: number of the first rank in the writer's stage.
            first_reader: number of the first rank in the reader's stage.
        """
        return self._replace(writer=self.writer + first_writer, reader=self.reader + first_reader)


def unit_copies(
    writers: KVManifest, readers: KVManifest, group: int, layers: tuple[int, int] | None = None
) -> tuple[RankCopy, ...]:
    """Return the byte ranges that one node's ranks write in a unit of another node's ranks.

    Each byte of a reader is written once. If several writers have the same heads, the readers of
    these heads are divided among the writers.

    Args:
        writers: manifest of the writing node.
        readers: manifest of the reading node; equal to ``writers`` except for ranks and stages.
        layers: range of layer slots of the group to copy; None: all layers.
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
    """Yield the copies to a reader of units in HEADS order, sorted by their offset at the reader.

    Args:
        moves: for each layer, its stage and slot at the writing node, and its slot at the reader.
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


def _append(copies: list[RankCopy], copy: RankCopy) -> None:
    """Add a copy to ``copies``; merge it with the last copy if their bytes are adjacent."""
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
    """Yield the copies to a reader of one array of one layer, sorted by their offset at the reader.

    Args:
        places: the layer's slot in the writers' units, and its slot in the reader's units.
        reader: rank of the reader within its stage.
        sizes: number of ranks per stage at the writing node, and at the reading node.
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
    """Return an array's offset in a rank's part of a unit, and its range of the shard axis."""
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
    """Return (writer, first, end) for each range of the shard axis that a reader receives."""
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
