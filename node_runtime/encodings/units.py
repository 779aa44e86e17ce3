"""Units: which units of a memory for encodings are free, and the references to those in use.

Refuses to know: bytes, images, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Units:
    """Reference counts of the units of one memory for encodings. Used by one thread.

    Args:
        num_units: number of units.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._free = list(reversed(range(num_units)))
        self._counts: dict[int, int] = {}  # number of references, by unit; free units are absent

    @property
    def num_free(self) -> int:
        """Return the number of free units, which have no reference."""
        return len(self._free)

    def take(self, num_units: int) -> tuple[int, ...] | None:
        """Take free units, with one reference each; None: too few units are free."""
        if num_units > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(num_units))
        self._counts.update(dict.fromkeys(taken, 1))
        return taken

    def hold(self, units: Iterable[int]) -> None:
        """Add a reference to each of these units, all of which have a reference already."""
        for unit in units:
            assert self._counts[unit] > 0
            self._counts[unit] += 1

    def release(self, units: Iterable[int]) -> None:
        """Drop a reference to each of these units; a unit without references becomes free."""
        for unit in units:
            self._counts[unit] -= 1
            if not self._counts[unit]:
                del self._counts[unit]
                self._free.append(unit)

    def ref_counts(self) -> Mapping[int, int]:
        """Return the number of references to each unit that is not free."""
        return dict(self._counts)
