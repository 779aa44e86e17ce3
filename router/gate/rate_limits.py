"""RateLimits: limits requests, tokens and hints per minute of each API key.

    bucket of a key   [#######...]   holds one minute's allowance and refills evenly
       a request enters: room for its estimated cost? -> taken; given back if it never begins
       it ends: the actual cost is known              -> the difference is taken or given back

A request that costs more than estimated takes its bucket below zero, so later requests wait longer.
A request larger than a whole bucket is admitted when the bucket is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.access.identity import Limits, Principal
from baton.api.errors import OverloadedError

_MAX_KEYS = 65_536  # maximum number of buckets; then the oldest bucket is forgotten


@dataclass(frozen=True, slots=True)
class Rate:
    """The current state of one rate limit of an API key.

    Attributes:
        limit: number of requests or tokens allowed per minute.
        remaining: number of requests or tokens that are left now.
        reset_s: seconds until the bucket is full.
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
    """The buckets of all API keys that have called one router.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def check(self, principal: Principal, num_tokens: int = 1) -> None:
        """Raise OverloadedError if a request with this many tokens may not begin now.

        The error says after how many seconds to retry.
        """
        limits = principal.limits
        for kind, per_minute, wanted in _kinds(limits, num_tokens):
            bucket = self._bucket(principal.name, kind, per_minute)
            missing = min(wanted, per_minute) - bucket.level
            if missing > 0:
                error = OverloadedError(f"this API key has used its {per_minute:g} {kind}")
                error.retry_delay_s = missing * 60 / per_minute
                raise error

    def charge_hint(self, principal: Principal, per_minute: float) -> None:
        """Take a hint from the bucket of a caller; raise OverloadedError if none is left."""
        bucket = self._bucket(principal.name, HINTS, per_minute)
        if bucket.level < 1:
            error = OverloadedError(f"--max-hints-per-minute: {per_minute:g} hints were sent")
            error.retry_delay_s = (1 - bucket.level) * 60 / per_minute
            raise error
        bucket.level -= 1

    def charge_limits(self, principal: Principal, num_tokens: int) -> None:
        """Take a request and its tokens from the buckets of its key."""
        for kind, per_minute, wanted in _kinds(principal.limits, num_tokens):
            self._bucket(principal.name, kind, per_minute).level -= wanted

    def give_back(self, principal: Principal, num_tokens: int, *, begun: bool) -> None:
        """Give unused tokens back to the bucket of a key; a negative number takes more tokens.

        Args:
            begun: whether the request has begun; if not, the request itself is given back, too.
        """
        for kind, per_minute, amount in _kinds(principal.limits, num_tokens):
            if kind == TOKENS or not begun:
                bucket = self._bucket(principal.name, kind, per_minute)
                bucket.level = min(bucket.level + amount, per_minute)

    def state(self, principal: Principal) -> dict[str, Rate]:
        """Return the state of each limit that a key has, by `REQUESTS` and `TOKENS`."""
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
HINTS = "hints per minute"


def _kinds(limits: Limits, num_tokens: int) -> list[tuple[str, float, float]]:
    """Return (name, allowed per minute, amount that a request takes) of each limit that is set."""
    found = []
    if limits.requests_per_minute:
        found.append((REQUESTS, limits.requests_per_minute, 1.0))
    if limits.tokens_per_minute:
        found.append((TOKENS, limits.tokens_per_minute, float(num_tokens)))
    return found
