"""RateLimits: how many requests and tokens per minute a key may have. Knows no queue and no node.

    bucket of a key   [#######...]   holds a minute's worth, fills evenly
       entry: has room for the estimate? -> taken      leaves before it began: given back
       end:   what it cost is known      -> the difference is taken, too, or given back

A request may cost more than was thought: the bucket then owes, and what comes next waits longer.
One that is larger than a whole bucket gets in when the bucket is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.access.identity import Limits, Principal
from baton.api.errors import OverloadedError

_MAX_KEYS = 65_536  # a key that was deleted is forgotten when there are so many others


@dataclass(frozen=True, slots=True)
class Rate:
    """One limit of a key, now.

    Attributes:
        limit: per minute.
        remaining: that a request could have now.
        reset_s: until all of it is there again.
    """

    limit: float
    remaining: float
    reset_s: float


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def fill(self, per_minute: float, now: float) -> None:
        filled = self.level + (now - self.at) * per_minute / 60
        self.level, self.at = min(filled, per_minute), now


class RateLimits:
    """The buckets of all keys that called one router.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def check(self, principal: Principal, num_tokens: int = 1) -> None:
        """Raise OverloadedError, with when there is room, unless a request of so many may begin."""
        limits = principal.limits
        for kind, per_minute, wanted in _kinds(limits, num_tokens):
            bucket = self._bucket(principal.name, kind, per_minute)
            missing = min(wanted, per_minute) - bucket.level
            if missing > 0:
                error = OverloadedError(f"this API key has used its {per_minute:g} {kind}")
                error.retry_delay_s = missing * 60 / per_minute
                raise error

    def take(self, principal: Principal, num_tokens: int) -> None:
        """Count a request that may begin."""
        for kind, per_minute, wanted in _kinds(principal.limits, num_tokens):
            self._bucket(principal.name, kind, per_minute).level -= wanted

    def give_back(self, principal: Principal, num_tokens: int, *, begun: bool) -> None:
        """Give back tokens that were taken and not needed (below 0: take more).

        Args:
            begun: the request counts; otherwise it is given back, too.
        """
        for kind, per_minute, amount in _kinds(principal.limits, num_tokens):
            if kind == TOKENS or not begun:
                bucket = self._bucket(principal.name, kind, per_minute)
                bucket.level = min(bucket.level + amount, per_minute)

    def state(self, principal: Principal) -> dict[str, Rate]:
        """What is left of the limits that a key has, by `REQUESTS` and `TOKENS`."""
        found = {}
        for kind, per_minute, _ in _kinds(principal.limits, 0):
            level = self._bucket(principal.name, kind, per_minute).level
            reset_s = (per_minute - level) * 60 / per_minute
            found[kind] = Rate(per_minute, max(level, 0.0), reset_s)
        return found

    def _bucket(self, name: str, kind: str, per_minute: float) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get((name, kind))
        if bucket is None:
            if len(self._buckets) >= _MAX_KEYS:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[name, kind] = _Bucket(per_minute, now)
        bucket.fill(per_minute, now)
        return bucket


REQUESTS = "requests per minute"
TOKENS = "tokens per minute"


def _kinds(limits: Limits, num_tokens: int) -> list[tuple[str, float, float]]:
    """The limits that there are: name, per minute, and what a request takes of it."""
    found = []
    if limits.requests_per_minute:
        found.append((REQUESTS, limits.requests_per_minute, 1.0))
    if limits.tokens_per_minute:
        found.append((TOKENS, limits.tokens_per_minute, float(num_tokens)))
    return found
