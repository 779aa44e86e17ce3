"""For any numbers of ranks each byte of each receiver is written once, with what belongs there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.api.errors import TransferError
from baton.kv_manifest import (
    KVGroup,
    KVKind,
    KVManifest,
    RankCopy,
    difference,
    rank_copies,
    shard,
)

RANKS = st.integers(1, 9)


def group(heads: int, *, axis: int | None = 2, layers: int = 3, dtype: str = "float16") -> KVGroup:
    return KVGroup(
        kind=KVKind.PAGED,
        layers=tuple(range(layers)),
        shape=(layers, 2, heads, 4, 5),
        block_size=4,
        shard_axis=axis,
        dtype=dtype,
    )


def part_of(unit: NDArray[Any], of: KVGroup, rank: int, num_ranks: int) -> NDArray[np.uint8]:
    """A rank's part of a unit, as bytes."""
    if of.shard_axis is None:
        part = unit
    else:
        places = range(*shard(of.shape[of.shard_axis], rank, num_ranks))
        part = unit.take(list(places), axis=of.shard_axis)
    assert part.shape == of.rank_shape(rank, num_ranks)
    assert part.nbytes == of.unit_bytes(rank, num_ranks)
    return np.frombuffer(part.tobytes(), np.uint8)


@given(
    heads=st.integers(1, 12),
    axis=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from([("float32", np.uint32), ("float16", np.uint16)]),
    num_writers=RANKS,
    num_readers=RANKS,
    layers=st.sampled_from([None, (0, 1), (1, 3), (2, 3)]),
)
def test_every_byte_is_written_once_and_right(
    heads: int,
    axis: int | None,
    dtype: tuple[str, type],
    num_writers: int,
    num_readers: int,
    layers: tuple[int, int] | None,
) -> None:
    one = group(heads, axis=axis, dtype=dtype[0])
    unit: NDArray[Any] = np.arange(math.prod(one.shape), dtype=dtype[1]).reshape(one.shape) + 1
    sources = [part_of(unit, one, rank, num_writers) for rank in range(num_writers)]
    wanted = unit.copy()
    if layers is not None:
        outside = [i for i in range(one.shape[0]) if i not in range(*layers)]
        wanted[outside] = 0
    targets = [np.zeros(one.unit_bytes(rank, num_readers), np.uint8) for rank in range(num_readers)]
    counts = [np.zeros(len(target), np.uint8) for target in targets]
    for writer, reader, source, target, num_bytes in rank_copies(
        one, num_writers, num_readers, layers
    ):
        place = slice(target, target + num_bytes)
        targets[reader][place] = sources[writer][source : source + num_bytes]
        counts[reader][place] += 1
    for rank, (written, count) in enumerate(zip(targets, counts, strict=True)):
        assert bytes(written) == bytes(part_of(wanted, one, rank, num_readers))
        # Of the layers that were asked for each byte once; all have the same number of bytes.
        first, end = layers or (0, one.shape[0])
        layer_bytes = len(count) // one.shape[0]
        assert (count[first * layer_bytes : end * layer_bytes] == 1).all()
        assert count.sum() == (end - first) * layer_bytes


def test_between_single_ranks_a_unit_is_one_range() -> None:
    for axis in (None, 2):
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
        "KV group 0 with dtype float32, not float16"
    )
    assert one.layout != KVManifest(groups=(group(8, dtype="float32"),)).layout
    assert difference(one, KVManifest(groups=(group(8), group(8)))) == "2 KV groups, not 1"


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ((group(8, dtype="int3"),), "dtype"),
        ((group(8, axis=5),), "shard_axis"),
        ((group(2**24),), "too many bytes"),
        ((group(8), group(4)), "not as large"),
        ((group(8), group(8, layers=2)), "not as large"),
    ],
)
def test_what_no_node_has_is_refused(groups: tuple[KVGroup, ...], problem: str) -> None:
    with pytest.raises(TransferError, match=problem):
        KVManifest(groups=groups).check()
