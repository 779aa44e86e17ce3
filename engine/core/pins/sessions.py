"""SessionPrefixes: the prefix of each session's last request, for hints that name a session."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from baton.kv.block_hash import BlockHash

# Maximum number of stored hashes of all sessions, per block of the KV cache.
HASHES_PER_BLOCK = 16
# Maximum number of sessions; needed because short prefixes have few hashes.
MAX_SESSIONS = 16_384
# Shortest time, in seconds, for which a prefetch counts against its owner's share.
LEAST_AHEAD_S = 10.0

_Name = tuple[bytes, bytes]


class SessionPrefixes:
    """Hashes of the prefix of each session's last request, by owner and session.

    If there are too many hashes or sessions, the owner with the most hashes loses its least
    recently used session. So an owner with many sessions cannot displace the sessions of others.

    Args:
        num_blocks: number of blocks of the KV cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = HASHES_PER_BLOCK * num_blocks
        self._owners: dict[bytes, dict[bytes, tuple[BlockHash, ...]]] = {}
        self._sizes: Counter[bytes] = Counter()
        self._num_sessions = 0

    def remember(self, owner: bytes, session: bytes, hashes: tuple[BlockHash, ...]) -> None:
        """Store the prefix of a session's last request."""
        self.forget(owner, session)
        if not hashes:
            return
        self._owners.setdefault(owner, {})[session] = hashes
        self._sizes[owner] += len(hashes)
        self._num_sessions += 1
        while self._sizes.total() > self._most or self._num_sessions > MAX_SESSIONS:
            largest = max(self._owners, key=self._sizes.__getitem__)
            self.forget(largest, next(iter(self._owners[largest])))

    def find(self, owner: bytes, session: bytes) -> tuple[BlockHash, ...]:
        """Return the hashes of a session's prefix; empty if the session is unknown."""
        return self._owners.get(owner, {}).get(session, ())

    def forget(self, owner: bytes, session: bytes) -> None:
        """Forget a session; do nothing if it is unknown."""
        of_owner = self._owners.get(owner, {})
        hashes = of_owner.pop(session, None)
        if hashes is None:
            return
        self._sizes[owner] -= len(hashes)
        self._num_sessions -= 1
        if not of_owner:
            del self._owners[owner], self._sizes[owner]

    def clear(self) -> None:
        """Forget all sessions."""
        self._owners.clear()
        self._sizes.clear()
        self._num_sessions = 0


class PrefetchBudget:
    """Limits how many blocks each owner may bring into the cache ahead of its requests.

    A prefetch costs its owner no computing, but evicts other tenants' prefixes. So the blocks of a
    prefetch count against the owner's share until the prefetch's time is over.

    Args:
        clock: returns seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken: dict[bytes, deque[tuple[float, int]]] = {}

    def num_left(self, owner: bytes, share: int) -> int:
        """Return how many blocks an owner's prefetches may still bring now."""
        kept = self._drop_expired(owner)
        return max(share - sum(num_blocks for _, num_blocks in kept), 0)

    def count_prefetch(self, owner: bytes, num_blocks: int, keep_s: float) -> None:
        """Count the blocks of a prefetch against its owner's share for ``keep_s`` seconds."""
        # Some owners never prefetch again. Checking two per call bounds the table cheaply.
        for oldest in list(islice(self._taken, 2)):
            self._drop_expired(oldest)
        if num_blocks:
            until = self._clock() + max(keep_s, LEAST_AHEAD_S)
            self._taken.setdefault(owner, deque()).append((until, num_blocks))

    def _drop_expired(self, owner: bytes) -> deque[tuple[float, int]]:
        """Drop an owner's ended prefetches; move the owner to the table's end; return the rest."""
        now = self._clock()
        kept = deque(one for one in self._taken.pop(owner, ()) if one[0] > now)
        if kept:
            self._taken[owner] = kept
        return kept
