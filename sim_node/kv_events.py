"""KVEventLog: tells the router how a simulated prefix cache changes, once the router has asked."""

from __future__ import annotations

from collections.abc import Callable

from baton.block_hash import shorten
from baton.link.words import KVCacheEvents
from sim_node.kv_cache import SimKVCache

# Stored names of a snapshot go in parts: a link carries other things, too.
MAX_NAMES_PER_EVENT = 16_384


class KVEventLog:
    """The messages of one node.

    Args:
        cache: whose changes are told.
        emit: takes them.
    """

    def __init__(self, cache: SimKVCache, emit: Callable[[KVCacheEvents], None]) -> None:
        self._cache = cache
        self._emit = emit
        self._sequence = 0
        self._wanted = False

    def begin(self) -> None:
        """Send all that is in the cache, and from now on what changes."""
        self._wanted = True
        self._cache.take_changes()
        names = self._cache.names()
        self._send(names[:MAX_NAMES_PER_EVENT], snapshot=True)
        for start in range(MAX_NAMES_PER_EVENT, len(names), MAX_NAMES_PER_EVENT):
            self._send(names[start : start + MAX_NAMES_PER_EVENT])

    def end(self) -> None:
        """Who asked is gone."""
        self._wanted = False

    def flush(self) -> None:
        """Send what has changed since the last message, if anything."""
        stored, removed = self._cache.take_changes()
        if self._wanted and (stored or removed):
            self._send(stored, removed)

    def _send(
        self,
        stored: tuple[bytes, ...],
        removed: tuple[bytes, ...] = (),
        *,
        snapshot: bool = False,
    ) -> None:
        self._sequence += 1
        self._emit(KVCacheEvents(self._sequence, snapshot, shorten(stored), shorten(removed)))
