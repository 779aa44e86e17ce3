"""Allowance: a rate limit (token bucket) for each of many names, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 4096


class Allowance:
    """Limit the rate of uses per name; thread-safe.

    At most ``max_names`` names are remembered. The least recently used name is forgotten first, and
    gets a full bucket at its next use.

    Args:
        burst: number of uses allowed at once.
        per_second: number of uses allowed per second in the long run.
        clock: returns monotonic seconds.
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
        # Name -> (number of uses left, time of the last use).
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def wait_s(self, name: str) -> float:
        """Return the seconds until the next use is allowed; 0 if it is allowed now."""
        with self._lock:
            return max(0.0, (1 - self._now_left(name)) / self._per_second)

    def take(self, name: str) -> bool:
        """Count one use of a name; return False if the rate limit is reached."""
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
