"""Checks of block ids and layers, and slices: the parts of blocks that each rank writes.

A slice is the part of a block that one node's rank writes to another node's rank. Slices depend
only on the two nodes' manifests. For example, a prefill node P writes to a decode node D:

    P, 2 ranks        D, 1 rank            each rank of P writes its heads: a range per layer for
    [0 1] [2 3]  ->   [0 1 2 3]            keys, and one for values; equal ranks: one whole range

Refuses to know: memory, the content of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from baton.kv.manifest import KVManifest, RankCopy, unit_copies

LayerRange = tuple[int, int]  # (first layer, layer after the last)
# (first byte, number of bytes) within one block in a rank's memory
Ranges = tuple[tuple[int, int], ...]


def layer_groups(num_layers: int, num_groups: int) -> tuple[LayerRange, ...]:
    """Divide layers into at most ``num_groups`` nearly equal ranges, larger ranges first.

    While the last range is sent, nothing is left to compute, so the last range is the smallest.
    """
    num_groups = min(num_groups, num_layers)
    size, larger = divmod(num_layers, num_groups)
    ends = [size * (index + 1) + min(index + 1, larger) for index in range(num_groups)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def count_runs(local: Sequence[int], remote: Sequence[int]) -> int:
    """Count the memory ranges that a copy of blocks ``local[i]`` to blocks ``remote[i]`` needs.

    Consecutive blocks that are adjacent in both memories share one range.
    """
    steps = zip(pairwise(local), pairwise(remote), strict=True)
    num_breaks = sum(b - a != 1 or d - c != 1 for (a, b), (c, d) in steps)
    return num_breaks + 1 if local else 0


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError for an unknown block id, because a bad address can crash the receiver."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        raise ValueError(f"block ids must be 0 to {num_blocks - 1}, got {list(block_ids)[:8]}")


def check_layers(layers: LayerRange | None, num_layers: int) -> None:
    """Raise ValueError for an unknown layer, because a bad address can crash the receiver."""
    if layers is not None and not 0 <= layers[0] < layers[1] <= num_layers:
        raise ValueError(f"layers: must be a range within 0 to {num_layers}, got {layers}")


class Pair(NamedTuple):
    """A rank of the sending node, and a rank of the receiving node that it writes to."""

    writer: int
    reader: int


class Slices:
    """The byte ranges of a block that each rank of one node writes to each rank of another node.

    Args:
        writers: manifest of the node that sends.
        readers: manifest of the node that receives.

    Attributes:
        is_whole: whether both nodes have one rank, so that each block is one range.
    """

    def __init__(self, writers: KVManifest, readers: KVManifest) -> None:
        self._writers, self._readers = writers, readers
        self.is_whole = writers.num_ranks == readers.num_ranks == 1
        self._copies: dict[tuple[int, LayerRange | None], dict[Pair, tuple[RankCopy, ...]]] = {}
        self._sums: dict[LayerRange | None, tuple[int, int]] = {}

    def of(self, kind: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        """Return the byte ranges of a block by pair of ranks, in the order of `pairs`.

        Args:
            kind: number of a KV group. All groups that have this number in `kinds` are sliced in
                the same way.
            layers: range of layers, counted over all ranks; None: all layers.
        """
        if layers == (0, self._writers.layers_per_unit):
            layers = None
        key = kind, layers
        if key not in self._copies:
            self._copies[key] = self._find(kind, layers)
        return self._copies[key]

    def _find(self, group: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        if self.is_whole:  # includes the padding of small groups
            num_bytes = self._writers.unit_bytes()
            first, end = layers or (0, self._writers.layers_per_unit)
            layer_bytes = num_bytes // self._writers.layers_per_unit
            start = first * layer_bytes
            return {Pair(0, 0): (RankCopy(0, 0, start, start, (end - first) * layer_bytes),)}
        found: dict[Pair, list[RankCopy]] = {}
        for copy in unit_copies(self._writers, self._readers, group, layers):
            found.setdefault(Pair(copy.writer, copy.reader), []).append(copy)
        return {pair: tuple(found[pair]) for pair in sorted(found)}

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Return, for each KV group, the first group whose blocks are sliced in the same way."""
        if self.is_whole:
            return (0,) * len(self._writers.groups)
        first: dict[tuple[RankCopy, ...], int] = {}
        return tuple(
            first.setdefault(unit_copies(self._writers, self._readers, group), group)
            for group in range(len(self._writers.groups))
        )

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Return each writing rank with each reading rank that gets a slice from it, sorted."""
        return tuple(sorted({pair for kind in set(self.kinds) for pair in self.of(kind, None)}))

    def readers_of(self, writer: int) -> list[int]:
        """Return the ranks of the receiving node that ``writer`` writes to."""
        return [pair.reader for pair in self.pairs if pair.writer == writer]

    def writers_of(self, reader: int) -> list[int]:
        """Return the ranks of the sending node that write to ``reader``."""
        return [pair.writer for pair in self.pairs if pair.reader == reader]

    def sorted_by_kind(
        self, groups: Sequence[int], num_blocks: int
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield each kind (see `kinds`) among the blocks, with the indexes of its blocks.

        Args:
            groups: KV group of each block; empty: all blocks have one kind.
        """
        if not groups or len(set(self.kinds)) == 1:
            yield self.kinds[0], range(num_blocks)
            return
        for kind in sorted({self.kinds[group] for group in groups}):
            yield kind, [i for i, group in enumerate(groups) if self.kinds[group] == kind]

    def num_bytes(self, layers: LayerRange | None) -> int:
        """Return the bytes that all ranks write for one block; the maximum over all kinds."""
        return self._sum(layers)[0]

    def num_ranges(self, layers: LayerRange | None) -> int:
        """Return how many byte ranges all ranks write for one block; the maximum over all kinds."""
        return self._sum(layers)[1]

    def _sum(self, layers: LayerRange | None) -> tuple[int, int]:
        if layers not in self._sums:
            copies = [
                [copy for of_pair in self.of(kind, layers).values() for copy in of_pair]
                for kind in set(self.kinds)
            ]
            self._sums[layers] = (
                max(sum(copy.num_bytes for copy in of_kind) for of_kind in copies),
                max(map(len, copies)),
            )
        return self._sums[layers]


def part_of_scratch(slot_bytes: int, writers: Sequence[int], writer: int) -> tuple[int, int]:
    """Return the first byte and the number of bytes that ``writer`` writes to a reader's slot.

    The ranks ``writers`` write to the same receiving rank, and together fill its self-test slot.
    """
    place, num_parts = writers.index(writer), len(writers)
    first, end = place * slot_bytes // num_parts, (place + 1) * slot_bytes // num_parts
    return first, end - first
