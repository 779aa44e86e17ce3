"""Allowance: so many times at once and so many per second, for each of many names. Bounded."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 4096


class Allowance:
    """A token bucket per name; safe to use from several threads.

    Of more names than it can hold, those that were used last stay: what is forgotten is full again.

    Args:
        burst: how often at once.
        per_second: how often in the long run.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        burst: float,
        per_second: float,
        *,
        max_names: int = MAX_NAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._max_names = max_names
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many, and when
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def wait_s(self, name: str) -> float:
        """Return the seconds until it may be done again; 0: now."""
        with self._lock:
            return max(0.0, (1 - self._now_left(name)) / self._per_second)

    def take(self, name: str) -> bool:
        """Count one time if there is one left, and say whether there was."""
        with self._lock:
            left = self._now_left(name)
            if left < 1:
                return False
            self._left[name] = (left - 1, self._clock())
            self._left.move_to_end(name)
            if len(self._left) > self._max_names:
                self._left.popitem(last=False)
            return True

    def _now_left(self, name: str) -> float:
        left, at = self._left.get(name, (self._burst, 0.0))
        return min(self._burst, left + (self._clock() - at) * self._per_second)
