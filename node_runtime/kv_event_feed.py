"""KVEventFeed: what changes in an engine's prefix cache, put into messages for the routers.

    take_events() of many steps -> what is left of it -> KVCacheEvents with a sequence number

Starts with the first router that asks. All routers get the same messages: a snapshot that one of
them needs does the others no harm. Refuses to know: links, and who listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.block_hash import BlockHash, ShortHash, shorten
from baton.link.words import KVCacheEvents
from engine.core.block_pool import BlocksCleared, BlocksRemoved, BlocksStored, KVCacheEvent

# A router that is told every few steps places nothing worse, and a busy node is not held up.
FLUSH_INTERVAL_S = 0.01
MAX_HASHES_PER_MESSAGE = 2**16  # 512 KiB


class KVEventSource(Protocol):
    """What is needed here of a `BlockPool`."""

    def start_events(self) -> list[BlockHash]: ...

    def take_events(self) -> list[KVCacheEvent]: ...


class KVEventFeed:
    """All but `request_snapshot` belongs to the thread that steps the engine.

    Args:
        source: whose prefix cache it is.
        emit: takes messages for the routers.
        clock: seconds that never go back.
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
        """Send a snapshot after the next step, and what changes from then on; from any thread."""
        self._snapshot_wanted = True

    def after_step(self, *, busy: bool) -> None:
        """Send what there is, unless it can wait for a step that follows at once.

        Only after a step: what is named by then is full and committed.
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
        """In as many messages as it takes; at least one."""
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
    """What is left of events: whether all was cleared, what is new since, what is gone.

    A content is stored only while it is not there, and removed only while it is: two events of one
    cancel out.
    """
    cleared = False
    stored: dict[BlockHash, None] = {}  # in order
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
