"""Slices: what each rank of one node writes of a unit to each rank of another.

    P, 2 ranks        D, 1 rank            heads of rank 0 -> a range for each layer, of keys and
    [0 1] [2 3]  ->   [0 1 2 3]            of values; where both have the same: one range, all of it

A slice is what goes from one rank to one other. Made of two manifests; knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from baton.kv_manifest import KVManifest, RankCopy, unit_copies
from kvconnector.blocks import LayerRange

Ranges = tuple[tuple[int, int], ...]  # (first byte, number of bytes) within a rank's unit


class Pair(NamedTuple):
    """A rank that writes, and one that it writes to."""

    writer: int
    reader: int


class Slices:
    """All slices between two nodes.

    Args:
        writers: of the node that sends.
        readers: of the node that receives.

    Attributes:
        is_whole: whether there is one rank on both sides, so that a unit is one range.
    """

    def __init__(self, writers: KVManifest, readers: KVManifest) -> None:
        self._writers, self._readers = writers, readers
        self.is_whole = writers.num_ranks == readers.num_ranks == 1
        self._copies: dict[tuple[int, LayerRange | None], dict[Pair, tuple[RankCopy, ...]]] = {}
        self._sums: dict[LayerRange | None, tuple[int, int]] = {}

    def of(self, kind: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        """Ranges of each pair of ranks that has any, in the order of the pairs.

        Args:
            kind: of units; see `kinds`.
            layers: of a unit, as if one rank had it; None: all of it.
        """
        if layers == (0, self._writers.layers_per_unit):
            layers = None
        key = kind, layers
        if key not in self._copies:
            self._copies[key] = self._find(kind, layers)
        return self._copies[key]

    def _find(self, group: int, layers: LayerRange | None) -> dict[Pair, tuple[RankCopy, ...]]:
        if self.is_whole:  # with what pads units of unlike groups
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
        """Of each group, the first one whose units travel alike."""
        if self.is_whole:
            return (0,) * len(self._writers.groups)
        first: dict[tuple[RankCopy, ...], int] = {}
        return tuple(
            first.setdefault(unit_copies(self._writers, self._readers, group), group)
            for group in range(len(self._writers.groups))
        )

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All that have anything to write."""
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
        """Kinds, and which of so many blocks are of each.

        Args:
            groups: of each block; empty: all are alike, or nobody has to know.
        """
        if not groups or len(set(self.kinds)) == 1:
            yield self.kinds[0], range(num_blocks)
            return
        for kind in sorted({self.kinds[group] for group in groups}):
            yield kind, [i for i, group in enumerate(groups) if self.kinds[group] == kind]

    def num_bytes(self, layers: LayerRange | None) -> int:
        """Bytes of one block, all slices together; of the kind of units with the most."""
        return self._sum(layers)[0]

    def num_ranges(self, layers: LayerRange | None) -> int:
        """Ranges that one block is written in, all slices together; of the kind with the most."""
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
    """The part of a slot that a rank writes in a self-test: first byte, number of bytes.

    All that write to one rank fill its slot together.
    """
    place, num_parts = writers.index(writer), len(writers)
    first, end = place * slot_bytes // num_parts, (place + 1) * slot_bytes // num_parts
    return first, end - first
