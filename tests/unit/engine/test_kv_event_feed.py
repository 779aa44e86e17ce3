"""Unit tests of KVEventFeed: which events routers get, when, and in which messages."""

from __future__ import annotations

import pytest

from baton.kv.block_hash import BlockHash, shorten
from baton.link.words import KVCacheEvents
from engine.core.block_pool import BlocksCleared, BlocksRemoved, BlocksStored, KVCacheEvent
from node_runtime.reports.kv_event_feed import FLUSH_INTERVAL_S, MAX_HASHES_PER_MESSAGE, KVEventFeed
from tests.fakes.time.virtual_clock import VirtualClock

A, B, C = (bytes([letter]) * 16 for letter in b"abc")


def short(*hashes: BlockHash) -> tuple[int, ...]:
    return shorten(hashes)


class Scene:
    """A feed over a cache whose events the test writes; remembers what was sent."""

    def __init__(self, *held: BlockHash) -> None:
        self.held = list(held)
        self.events: list[KVCacheEvent] = []
        self.sent: list[KVCacheEvents] = []
        self.clock = VirtualClock()
        self.feed = KVEventFeed(self, self.sent.append, self.clock)

    def start_events(self) -> list[BlockHash]:
        self.events = []
        return self.held

    def take_events(self) -> list[KVCacheEvent]:
        events, self.events = self.events, []
        return events

    def start(self) -> None:
        self.feed.request_snapshot()
        self.step()
        self.sent.clear()

    def step(self, *events: KVCacheEvent, busy: bool = False) -> None:
        self.events += events
        self.feed.after_step(busy=busy)


def test_nothing_is_taken_or_sent_until_a_router_asks() -> None:
    scene = Scene(A)
    scene.step(BlocksStored((B,), A))
    assert scene.sent == []
    assert len(scene.events) == 1


def test_the_snapshot_comes_first_and_after_a_step() -> None:
    scene = Scene(A, B)
    scene.feed.request_snapshot()
    assert scene.sent == []
    scene.step(busy=True)
    assert scene.sent == [KVCacheEvents(1, True, short(A, B))]
    scene.step()
    scene.step(BlocksStored((C,), B))
    assert scene.sent[1:] == [KVCacheEvents(2, False, short(C))]


def test_an_empty_cache_has_a_snapshot_too() -> None:
    scene = Scene()
    scene.feed.request_snapshot()
    scene.step()
    assert scene.sent == [KVCacheEvents(1, True)]


def test_a_second_router_makes_no_new_sequence() -> None:
    scene = Scene(A)
    scene.start()
    scene.feed.request_snapshot()
    scene.step()
    assert scene.sent == [KVCacheEvents(2, True, short(A))]


def test_a_busy_node_sends_at_most_one_message_per_interval_and_an_idle_one_at_once() -> None:
    scene = Scene()
    scene.start()
    scene.clock.advance(1.0)
    scene.step(BlocksStored((A,), None), busy=True)
    scene.step(BlocksStored((B,), A), busy=True)
    assert [message.stored for message in scene.sent] == [short(A)]
    scene.clock.advance(FLUSH_INTERVAL_S)
    scene.step(busy=True)
    assert [message.stored for message in scene.sent] == [short(A), short(B)]
    scene.step(BlocksStored((C,), B), busy=True)
    scene.step(busy=False)
    assert [message.stored for message in scene.sent] == [short(A), short(B), short(C)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([BlocksStored((A, B), None)], (False, (A, B), ())),
        ([BlocksStored((A, B), None), BlocksRemoved((A,))], (False, (B,), ())),
        ([BlocksRemoved((A,)), BlocksStored((A, B), None)], (False, (B,), ())),
        ([BlocksRemoved((A,)), BlocksStored((B,), None)], (False, (B,), (A,))),
        ([BlocksStored((A,), None), BlocksCleared()], (True, (), ())),
        ([BlocksRemoved((A,)), BlocksCleared(), BlocksStored((B,), None)], (True, (B,), ())),
        (
            [BlocksStored((A,), None), BlocksRemoved((A,)), BlocksStored((A,), None)],
            (False, (A,), ()),
        ),
    ],
)
def test_what_cancels_out_is_not_sent(
    events: list[KVCacheEvent], expected: tuple[bool, tuple[bytes, ...], tuple[bytes, ...]]
) -> None:
    scene = Scene()
    scene.start()
    scene.step(*events)
    snapshot, stored, removed = expected
    assert scene.sent == [KVCacheEvents(2, snapshot, short(*stored), short(*removed))]


def test_when_all_cancels_out_nothing_is_sent() -> None:
    scene = Scene()
    scene.start()
    scene.step(BlocksStored((A,), None), BlocksRemoved((A,)))
    assert scene.sent == []


def test_a_large_cache_travels_in_parts_and_only_the_first_is_a_snapshot() -> None:
    hashes = [number.to_bytes(16, "little") for number in range(MAX_HASHES_PER_MESSAGE + 1)]
    scene = Scene(*hashes)
    scene.feed.request_snapshot()
    scene.step()
    assert [(m.sequence, m.snapshot, len(m.stored)) for m in scene.sent] == [
        (1, True, MAX_HASHES_PER_MESSAGE),
        (2, False, 1),
    ]
    assert sum((message.stored for message in scene.sent), ()) == shorten(hashes)
