"""KVEventFeed: sends the changes of an engine's prefix cache to the routers.

    take_events() of many steps -> their net effect -> KVCacheEvents with a sequence number

The feed starts when a router first asks for a snapshot. All routers get the same messages; a
snapshot that another router asked for does no harm. Refuses to know: links, receivers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv.block_hash import BlockHash, ShortHash, shorten
from baton.link.words import KVCacheEvents
from engine.core.block_pool import BlocksCleared, BlocksRemoved, BlocksStored, KVCacheEvent

# Seconds between messages of a busy node: often enough for good placement, yet no burden.
FLUSH_INTERVAL_S = 0.01
MAX_HASHES_PER_MESSAGE = 2**16  # so that a message has at most 512 KiB of hashes


class KVEventSource(Protocol):
    """The part of `BlockPool` from which the feed gets its events."""

    def start_events(self) -> list[BlockHash]: ...

    def take_events(self) -> list[KVCacheEvent]: ...


class KVEventFeed:
    """Sends prefix cache events. Only `request_snapshot` is thread-safe.

    Args:
        source: the prefix cache.
        emit: sends messages to all routers.
        clock: returns seconds, never going back.
    """

    def __init__(
        self,
        source: KVEventSource,
        emit: Callable[[KVCacheEvents], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._emit = emit
        self._clock = clock
        self._is_on = False
        self._snapshot_wanted = False
        self._flush_at = 0.0
        self._sequence = 0

    def request_snapshot(self) -> None:
        """Send a snapshot after the next step, then all changes; safe from any thread."""
        self._snapshot_wanted = True

    def after_step(self, *, busy: bool) -> None:
        """Send pending changes; while the node is busy, only once per `FLUSH_INTERVAL_S`.

        Call this only after a step: then all cached blocks are full and committed.
        """
        if self._snapshot_wanted:
            self._snapshot_wanted = False
            self._is_on = True
            self._send(True, shorten(self._source.start_events()), ())
        elif self._is_on:
            now = self._clock()
            if not busy or now >= self._flush_at:
                self._flush_at = now + FLUSH_INTERVAL_S
                cleared, stored, removed = _sum_up(self._source.take_events())
                if cleared or stored or removed:
                    self._send(cleared, stored, removed)

    def _send(
        self, snapshot: bool, stored: Sequence[ShortHash], removed: Sequence[ShortHash]
    ) -> None:
        """Send hashes in as many messages as needed, but at least one."""
        size = MAX_HASHES_PER_MESSAGE
        for start in range(0, max(len(stored), len(removed), 1), size):
            self._sequence += 1
            part = slice(start, start + size)
            is_first = start == 0
            self._emit(
                KVCacheEvents(
                    self._sequence, snapshot and is_first, tuple(stored[part]), tuple(removed[part])
                )
            )


def _sum_up(
    events: Sequence[KVCacheEvent],
) -> tuple[bool, tuple[ShortHash, ...], tuple[ShortHash, ...]]:
    """Return the net effect of events: whether all was cleared, and stored and removed hashes.

    A hash is stored only while it is absent, and removed only while it is present, so two
    successive events of one hash cancel out.
    """
    cleared = False
    stored: dict[BlockHash, None] = {}  # a dict keeps the hashes in order
    removed: dict[BlockHash, None] = {}
    for event in events:
        match event:
            case BlocksStored(hashes):
                _add(hashes, stored, removed)
            case BlocksRemoved(hashes):
                _add(hashes, removed, stored)
            case BlocksCleared():
                cleared = True
                stored.clear()
                removed.clear()
    return cleared, shorten(stored), shorten(removed)


def _add(
    hashes: Sequence[BlockHash], to: dict[BlockHash, None], opposite: dict[BlockHash, None]
) -> None:
    for block_hash in hashes:
        if block_hash in opposite:
            del opposite[block_hash]
        else:
            to[block_hash] = None
