"""Slices: the parts of a unit that each rank of one node writes to each rank of another.

    P, 2 ranks        D, 1 rank            heads of rank 0 -> a range for each layer, of keys and
    [0 1] [2 3]  ->   [0 1 2 3]            of values; with equal ranks: one range, the whole unit

A slice travels from one rank to one other rank. Two manifests alone decide the slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from baton.kv.manifest import KVManifest, RankCopy, unit_copies
from kvconnector.blocks import LayerRange

Ranges = tuple[tuple[int, int], ...]  # (first byte, number of bytes) within a rank's unit


class Pair(NamedTuple):
    """A writing rank, and the rank that it writes to."""

    writer: int
    reader: int


class Slices:
    """All slices between two nodes.

    Args:
        writers: manifest of the node that sends.
        readers: manifest of the node that receives.

    Attributes:
        is_whole: whether both nodes have one rank, so that a unit is one range.
    """

    def __init__(self, writers: KVManifest, readers: KVManifest) -> None:
        self._writers, self._readers = writers, readers
        self.is_whole = writers.num_ranks == readers.num_ranks == 1
        self._copies: dict[tuple[int, LayerRange | None], dict[Pair, tuple[RankCopy, ...]]] = {}
        self._sums: dict[LayerRange | None, tuple[int, int]] = {}

    def of(self, kind: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        """Return the ranges of each pair of ranks that shares any, in order of the pairs.

        Args:
            kind: a kind of unit; see `kinds`.
            layers: range of layers of the whole unit, over all ranks; None: all layers.
        """
        if layers == (0, self._writers.layers_per_unit):
            layers = None
        key = kind, layers
        if key not in self._copies:
            self._copies[key] = self._find(kind, layers)
        return self._copies[key]

    def _find(self, group: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        if self.is_whole:  # includes the padding of smaller groups
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
        """Return, for each group, the first group whose units are cut in the same way."""
        if self.is_whole:
            return (0,) * len(self._writers.groups)
        first: dict[tuple[RankCopy, ...], int] = {}
        return tuple(
            first.setdefault(unit_copies(self._writers, self._readers, group), group)
            for group in range(len(self._writers.groups))
        )

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Return all pairs that share a slice."""
        return tuple(sorted({pair for kind in set(self.kinds) for pair in self.of(kind, None)}))

    def readers_of(self, writer: int) -> list[int]:
        """Return the ranks that a rank writes to."""
        return [pair.reader for pair in self.pairs if pair.writer == writer]

    def writers_of(self, reader: int) -> list[int]:
        """Return the ranks that write to a rank."""
        return [pair.writer for pair in self.pairs if pair.reader == reader]

    def sorted_by_kind(
        self, groups: Sequence[int], num_blocks: int
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield each kind of units with the indexes of its blocks.

        Args:
            groups: KV group of each block; empty: all blocks are alike.
        """
        if not groups or len(set(self.kinds)) == 1:
            yield self.kinds[0], range(num_blocks)
            return
        for kind in sorted({self.kinds[group] for group in groups}):
            yield kind, [i for i, group in enumerate(groups) if self.kinds[group] == kind]

    def num_bytes(self, layers: LayerRange | None) -> int:
        """Return the bytes of one block over all slices, for the largest kind of units."""
        return self._sum(layers)[0]

    def num_ranges(self, layers: LayerRange | None) -> int:
        """Return the most ranges of one block over all slices, among all kinds."""
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
    """Return the part of a slot that a rank writes in a self-test: first byte, number of bytes.

    The ranks that write to one reader fill its slot together.
    """
    place, num_parts = writers.index(writer), len(writers)
    first, end = place * slot_bytes // num_parts, (place + 1) * slot_bytes // num_parts
    return first, end - first
