"""EncodingStore: encodings of images by digest, in the memory from which they are sent.

    kept    the store holds an encoding's units; the least recently used encoding leaves first
    sent    each transfer holds the units, too, until none of its writes is in flight

Refuses to know: requests, peers, how images are encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.kv.encodings import num_units
from node_runtime.encodings.units import Units


class WritesEncodings(Protocol):
    """The memory whose units hold encodings (`node_runtime/encodings/memory.py`)."""

    def write(self, units: Sequence[int], embeddings: Any) -> None:
        """Write an encoding ``[num_embeddings, width]`` to its units."""


@dataclass(frozen=True, slots=True)
class KeptEncoding:
    """A kept encoding: its digest and its units of memory, in order."""

    digest: bytes
    units: tuple[int, ...]
    num_embeddings: int


class EncodingStore:
    """The encodings of one encode node. Used by one thread.

    Args:
        units: which units of ``memory`` are free.
        memory: memory that holds the embeddings, and from which they are sent.
    """

    def __init__(self, units: Units, memory: WritesEncodings) -> None:
        self.units = units
        self._memory = memory
        self._kept: OrderedDict[bytes, KeptEncoding] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Return the number of kept encodings."""
        return len(self._kept)

    def hold(self, digest: bytes) -> KeptEncoding | None:
        """Return an encoding, and hold its units for a transfer; None: it is not kept."""
        kept = self._kept.get(digest)
        if kept is not None:
            self._kept.move_to_end(digest)
            self.units.hold(kept.units)
        return kept

    def release(self, kept: KeptEncoding) -> None:
        """Release an encoding's units, because a transfer of the encoding has ended."""
        self.units.release(kept.units)

    def may_fit(self, num_tokens: int) -> bool:
        """Return whether an encoding of this many tokens fits an otherwise empty store."""
        return num_units(num_tokens) <= self.units.num_units

    def make_room(self, num_tokens: int) -> bool:
        """Drop encodings until a new one of ``num_tokens`` tokens fits; return whether it fits.

        The units of a dropped encoding stay in use while the encoding is being sent.
        """
        needed = num_units(num_tokens)
        while self.units.num_free < needed and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self.units.release(oldest.units)
        return self.units.num_free >= needed

    def add(self, digest: bytes, embeddings: Any) -> None:
        """Keep a new encoding ``[num_embeddings, width]``; call after `make_room`."""
        units = self.units.take(num_units(len(embeddings)))
        assert units is not None, "make_room was not called"
        self._memory.write(units, embeddings)
        self._kept[digest] = KeptEncoding(digest, units, len(embeddings))

    def forget_all(self) -> int:
        """Drop all encodings; return their number."""
        num_kept = len(self._kept)
        for kept in self._kept.values():
            self.units.release(kept.units)
        self._kept.clear()
        return num_kept

    def kept_units(self) -> list[int]:
        """Return the units of all kept encodings."""
        return [unit for kept in self._kept.values() for unit in kept.units]
