"""HintQueue: lets sessions' prefetches wait, so that they take only a small part of a node's time.

    router -> put -> (one session of each owner in turn) -> handle        on the node's thread

A prefetch of a long session takes milliseconds of the thread that also runs the engine's steps, and
a client may send thousands of prefetches per minute. Refuses to know: what a prefetch does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Maximum share of the thread's time that prefetches take, and maximum seconds of this share that
# can be saved up for later prefetches.
SHARE, MAX_SAVED_S = 0.05, 0.05
MAX_WAITING = 4096  # maximum number of sessions that wait


class HintQueue:
    """The sessions whose prefetches wait on one node. Used on the node's thread.

    If too many sessions wait, the owner with the most waiting sessions loses the oldest of these.

    Args:
        prefetch: gets owner, session and the seconds for which to keep the session's prefix.
        clock: returns seconds, never going back.
    """

    def __init__(
        self,
        prefetch: Callable[[bytes, bytes, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefetch, self._clock = prefetch, clock
        # Seconds to keep each session's prefix, by owner and session; the next owner comes first.
        self._waiting: dict[bytes, dict[bytes, float]] = {}
        self._num_waiting = 0
        self._saved_s, self._counted_at = MAX_SAVED_S, clock()

    def __len__(self) -> int:
        """Return the number of sessions that wait."""
        return self._num_waiting

    def put(self, owner: bytes, session: bytes, keep_s: float) -> None:
        """Queue a prefetch; replace an earlier prefetch of the session that still waits."""
        of_owner = self._waiting.setdefault(owner, {})
        self._num_waiting += session not in of_owner
        of_owner[session] = keep_s
        if self._num_waiting > MAX_WAITING:
            most = max(self._waiting, key=lambda one: len(self._waiting[one]))
            self._take(most)
            logger.debug("dropped a prefetch: %d sessions wait", MAX_WAITING)

    def forget(self, owner: bytes, session: bytes) -> None:
        """Drop the prefetch of a session; do nothing if none waits."""
        of_owner = self._waiting.get(owner, {})
        if of_owner.pop(session, None) is not None:
            self._num_waiting -= 1
            if not of_owner:
                del self._waiting[owner]

    def handle_waiting(self) -> None:
        """Carry out prefetches until none waits, or their share of the time is used up."""
        self._count_time(SHARE)
        while self._waiting and self._saved_s > 0:
            owner = next(iter(self._waiting))
            session, keep_s = self._take(owner)
            if owner in self._waiting:
                self._waiting[owner] = self._waiting.pop(owner)  # another owner is next
            self._prefetch(owner, session, keep_s)
            self._count_time(-1.0)

    def _take(self, owner: bytes) -> tuple[bytes, float]:
        """Remove and return an owner's oldest session, and the seconds to keep its prefix."""
        of_owner = self._waiting[owner]
        session = next(iter(of_owner))
        keep_s = of_owner.pop(session)
        self._num_waiting -= 1
        if not of_owner:
            del self._waiting[owner]
        return session, keep_s

    def _count_time(self, factor: float) -> None:
        """Add the seconds since the last call, multiplied by ``factor``, to those saved up."""
        now = self._clock()
        self._saved_s = min(self._saved_s + factor * (now - self._counted_at), MAX_SAVED_S)
        self._counted_at = now
