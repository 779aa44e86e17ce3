"""Property tests: between any numbers of ranks, each byte is written once, with the right value."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.api.errors import TransferError
from baton.kv.manifest import (
    HandOffRule,
    KVArray,
    KVGroup,
    KVKind,
    KVManifest,
    KVOrder,
    RankCopy,
    array_offsets,
    difference,
    shard,
    unit_copies,
)

RANKS = st.integers(1, 9)


def rank_copies(
    group: KVGroup, num_writers: int, num_readers: int, layers: tuple[int, int] | None = None
) -> tuple[RankCopy, ...]:
    """Return copies between ranks that each have all layers of one group."""
    writers, readers = (
        KVManifest(groups=(group,), num_ranks=num_ranks) for num_ranks in (num_writers, num_readers)
    )
    return unit_copies(writers, readers, 0, layers)


def group(
    heads: int,
    *,
    axis: int | None = 1,
    layers: int = 3,
    dtype: str = "float16",
    kind: KVKind = KVKind.PAGED,
) -> KVGroup:
    return KVGroup(
        kind=kind,
        layers=tuple(range(layers)),
        arrays=(KVArray(shape=(2, heads, 4, 5), dtype=dtype, shard_axis=axis),),
        num_places=layers,
        block_size=4,
    )


def states(heads: int, channels: int) -> KVGroup:
    """Make the group of a recurrence and a convolution; ranks split each by its first axis."""
    return KVGroup(
        kind=KVKind.STATE,
        layers=(1, 3, 4),
        arrays=(
            KVArray(shape=(channels, 3), dtype="bfloat16", shard_axis=0),
            KVArray(shape=(heads, 3, 5), dtype="float32", shard_axis=0),
        ),
        num_places=3,
        block_size=64,
        handoff=HandOffRule.AT_BOUNDARY,
    )


def unit_of(one: KVGroup) -> list[list[NDArray[Any]]]:
    """Numbers of a whole unit, no two alike among those of a size: of each place each array."""
    unit, start = list[list[NDArray[Any]]](), 1
    for _ in range(one.num_places):
        place = list[NDArray[Any]]()
        for array in one.arrays:
            integers: type = np.uint32 if array.dtype == "float32" else np.uint16
            size = math.prod(array.shape)
            place.append(np.arange(start, start + size, dtype=integers).reshape(array.shape))
            start += size
        unit.append(place)
    return unit


def part_of(
    unit: list[list[NDArray[Any]]], of: KVGroup, rank: int, num_ranks: int, marked: bool = False
) -> NDArray[np.uint8]:
    """A rank's part of a unit, as bytes; with ``marked`` a 1 for each that is no padding."""
    part = np.zeros(of.unit_bytes(rank, num_ranks), np.uint8)
    offsets = array_offsets(of.arrays, rank, num_ranks)
    for place, numbers in enumerate(unit):
        for array, whole, offset in zip(of.arrays, numbers, offsets, strict=False):
            mine = whole
            if array.shard_axis is not None:
                span = range(*shard(array.shape[array.shard_axis], rank, num_ranks))
                mine = whole.take(list(span), axis=array.shard_axis)
            assert mine.shape == array.rank_shape(rank, num_ranks)
            start = place * of.layer_bytes(rank, num_ranks) + offset
            data = np.frombuffer(mine.tobytes(), np.uint8)
            part[start : start + len(data)] = 1 if marked else data
    return part


@given(
    one=st.builds(group, st.integers(1, 16), axis=st.sampled_from([None, 0, 1]),
                  dtype=st.sampled_from(["float32", "float16"]),
                  kind=st.sampled_from([KVKind.PAGED, KVKind.WINDOW]))
    | st.builds(group, st.just(1), axis=st.none(), kind=st.just(KVKind.LATENT))
    | st.builds(states, st.integers(1, 16), st.integers(1, 40)),
    num_writers=RANKS,
    num_readers=RANKS,
    layers=st.sampled_from([None, (0, 1), (1, 3), (2, 3)]),
)  # fmt: skip
def test_every_byte_is_written_once_and_right(
    one: KVGroup, num_writers: int, num_readers: int, layers: tuple[int, int] | None
) -> None:
    unit = unit_of(one)
    sources = [part_of(unit, one, rank, num_writers) for rank in range(num_writers)]
    targets = [np.zeros(one.unit_bytes(rank, num_readers), np.uint8) for rank in range(num_readers)]
    counts = [np.zeros(len(target), np.uint8) for target in targets]
    for writer, reader, source, target, num_bytes in rank_copies(
        one, num_writers, num_readers, layers
    ):
        place = slice(target, target + num_bytes)
        targets[reader][place] = sources[writer][source : source + num_bytes]
        counts[reader][place] += 1
    first, end = layers or (0, one.num_places)
    for rank, (written, count) in enumerate(zip(targets, counts, strict=True)):
        # Of the layers that were asked for each byte once, of the others none.
        layer_bytes = one.layer_bytes(rank, num_readers)
        inside = np.zeros(len(count), np.uint8)
        inside[first * layer_bytes : end * layer_bytes] = 1
        wanted = part_of(unit, one, rank, num_readers)
        marks = part_of(unit, one, rank, num_readers, marked=True)
        assert bytes(count) == bytes(marks * inside)
        assert bytes(written) == bytes(wanted * inside)


@given(
    one=st.builds(group, st.integers(1, 16), axis=st.sampled_from([None, 1]),
                  layers=st.just(4)),
    writers=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 4)),
    readers=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 4)),
    layers=st.sampled_from([None, (0, 1), (1, 3), (2, 4)]),
    unequal=st.booleans(),
)  # fmt: skip
def test_stages_on_either_side_have_each_byte_written_once_and_right(
    one: KVGroup,
    writers: tuple[int, int],
    readers: tuple[int, int],
    layers: tuple[int, int] | None,
    unequal: bool,
) -> None:
    unit = unit_of(one)
    sides = [
        KVManifest(
            groups=(one,),
            num_ranks=size * stages,
            num_stages=stages,
            stage_layers=UNEQUAL[stages] if unequal else (),
        )
        for size, stages in (writers, readers)
    ]
    for side in sides:
        side.check()
    sources, wanted = ([stage_part(unit, side, rank) for rank in ranks_of(side)] for side in sides)
    targets = [np.zeros(len(part), np.uint8) for part in wanted]
    counts = [np.zeros(len(part), np.uint8) for part in wanted]
    for writer, reader, source, target, num_bytes in unit_copies(sides[0], sides[1], 0, layers):
        span = slice(target, target + num_bytes)
        targets[reader][span] = sources[writer][source : source + num_bytes]
        counts[reader][span] += 1
    for rank, (written, count) in enumerate(zip(targets, counts, strict=True)):
        stage, part = divmod(rank, readers[0])
        layer_bytes = one.layer_bytes(part, readers[0])
        inside = np.zeros(len(count), np.uint8)
        for index, place in enumerate(sides[1].places(one, stage)):
            if place in range(*(layers or (0, 4))):
                inside[index * layer_bytes : (index + 1) * layer_bytes] = 1
        assert bytes(count) == bytes(inside)
        assert bytes(written) == bytes(wanted[rank] * inside)


# Four layers in so many stages.
UNEQUAL = {1: (4,), 2: (3, 1), 3: (1, 2, 1), 4: (1, 1, 1, 1)}


def ranks_of(side: KVManifest) -> range:
    return range(side.num_ranks)


SIZES = (1, 2, 3, 4, 6, 8)


def by_heads(heads: int) -> KVGroup:
    return msgspec.structs.replace(group(heads), order=KVOrder.HEADS)


@pytest.mark.parametrize("heads", range(1, 17))
def test_ordered_by_heads_a_ranks_part_is_one_range_whatever_the_ranks_of_a_stage(
    heads: int,
) -> None:
    for num_writers, num_readers in itertools.product(SIZES, SIZES):
        copies = rank_copies(by_heads(heads), num_writers, num_readers)
        pairs = [(copy.writer, copy.reader) for copy in copies]
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("one", [group(8), group(1, axis=None)], ids=["heads", "latents"])
def test_ordered_by_layers_a_unit_is_one_range_where_shares_are_equal(one: KVGroup) -> None:
    for size in SIZES:
        copies = rank_copies(one, size, size)
        pairs = [(copy.writer, copy.reader) for copy in copies]
        assert len(pairs) == len(set(pairs))


@given(
    heads=st.integers(1, 16),
    writers=st.tuples(st.sampled_from(SIZES), st.integers(1, 3)),
    readers=st.tuples(st.sampled_from(SIZES), st.integers(1, 3)),
)
def test_ordered_by_heads_each_byte_is_written_once_and_right(
    heads: int, writers: tuple[int, int], readers: tuple[int, int]
) -> None:
    one = by_heads(heads)
    unit = [place[0] for place in unit_of(one)]  # [2, heads, 4, 5] of each layer

    def part(side: KVManifest, rank: int) -> bytes:
        stage, place = divmod(rank, side.stage_size)
        of_layers = [unit[layer] for layer in side.places(one, stage)]
        mine = range(*shard(heads, place, side.stage_size))
        return b"".join(layer[:, head].tobytes() for head in mine for layer in of_layers)

    sides = [
        KVManifest(groups=(one,), num_ranks=size * stages, num_stages=stages)
        for size, stages in (writers, readers)
    ]
    wanted = [part(sides[1], rank) for rank in ranks_of(sides[1])]
    written = [bytearray(len(one)) for one in wanted]
    num_written = 0
    for writer, reader, source, target, num_bytes in unit_copies(sides[0], sides[1], 0):
        found = part(sides[0], writer)[source : source + num_bytes]
        written[reader][target : target + num_bytes] = found
        num_written += len(found)
    assert list(map(bytes, written)) == wanted
    assert num_written == sum(map(len, wanted))


def stage_part(unit: list[list[NDArray[Any]]], side: KVManifest, rank: int) -> NDArray[np.uint8]:
    """Return a stage rank's part of a unit of the first group: its layers' places, in order."""
    one = side.groups[0]
    stage, part = divmod(rank, side.stage_size)
    whole = part_of(unit, one, part, side.stage_size)
    size = one.layer_bytes(part, side.stage_size)
    own = [whole[p * size : (p + 1) * size] for p in side.places(one, stage)]
    assert len(own) * size == side.unit_bytes(rank) <= side.max_unit_bytes
    return np.concatenate(own)


def test_ranks_that_stages_cannot_be_of_are_refused() -> None:
    for num_ranks, num_stages in ((3, 2), (4, 4)):
        with pytest.raises(TransferError, match="num_stages"):
            KVManifest(groups=(group(2),), num_ranks=num_ranks, num_stages=num_stages).check()
    for layers in ((1, 1), (1, 1, 1), (3,)):
        manifest = KVManifest(groups=(group(2),), num_ranks=2, num_stages=2, stage_layers=layers)
        with pytest.raises(TransferError, match="stage_layers"):
            manifest.check()


def test_between_single_ranks_a_unit_is_one_range() -> None:
    for axis in (None, 1):
        one = group(8, axis=axis)
        assert rank_copies(one, 1, 1) == (RankCopy(0, 0, 0, 0, one.unit_bytes(0, 1)),)
        per_layer = one.unit_bytes(0, 1) // 3
        assert rank_copies(one, 1, 1, (1, 3)) == (
            RankCopy(0, 0, per_layer, per_layer, 2 * per_layer),
        )


def test_readers_are_spread_over_writers_that_have_the_same() -> None:
    for one in (group(2), group(2, axis=None)):
        copies = rank_copies(one, 8, 8)
        assert {(copy.writer, copy.reader) for copy in copies} >= {(0, 0), (1, 1), (6, 6)}
        assert len({copy.writer for copy in copies}) == 8


def test_numbers_of_ranks_are_no_difference_and_all_else_is_named() -> None:
    one = KVManifest(groups=(group(8),), num_ranks=1)
    assert difference(one, KVManifest(groups=(group(8),), num_ranks=4)) == ""
    assert one.layout == KVManifest(groups=(group(8),), num_ranks=4).layout
    assert difference(one, KVManifest(groups=(group(8, dtype="float32"),))) == (
        f"KV group 0 with arrays {group(8, dtype='float32').arrays}, not {group(8).arrays}"
    )
    assert one.layout != KVManifest(groups=(group(8, dtype="float32"),)).layout
    assert difference(one, KVManifest(groups=(group(8), group(8)))) == "2 KV groups, not 1"


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((group(8, dtype="int3"),), "dtype"),
        ((group(8, axis=5),), "shard_axis"),
        ((group(2**24),), "too many bytes"),
        ((msgspec.structs.replace(group(8), num_places=2),), "layers"),
    ],
)
def test_what_no_node_has_is_refused(groups: tuple[KVGroup, ...], problem: str) -> None:
    with pytest.raises(TransferError, match=problem):
        KVManifest(groups=groups).check()


def test_units_of_unlike_groups_are_padded_to_the_largest() -> None:
    paged, state = group(2), states(3, 5)
    manifest = KVManifest(groups=(paged, state))
    manifest.check()
    largest = max(paged.unit_bytes(), state.unit_bytes())
    assert manifest.unit_bytes() == -(-largest // 16) * 16
    assert manifest.layers_per_unit == 1
    assert KVManifest(groups=(group(2), group(2))).layers_per_unit == 3
