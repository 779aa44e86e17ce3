"""Unit tests of beats at the router: which nodes are lost, and which beats are answered."""

from __future__ import annotations

import dataclasses

import pytest

from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.words import NodeBeat, NodeRole, PeerReport, PeerReports, RouterBeat
from router.fleet.load import beat_watch
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock


def test_any_message_of_a_node_is_a_sign_of_life() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    for _ in range(20):
        prefill.say()
        decode.reach(prefill)
        pool.count_missed_beats()
    assert len(pool.nodes) == 2


@pytest.mark.parametrize(("num_running", "interval_s"), [(1, 0.25), (0, 0.5)])
def test_the_router_only_answers_beats_and_at_most_twice_a_second(
    num_running: int, interval_s: float
) -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    for _ in range(round(10 / interval_s)):
        pool.on_event(decode.node, NodeBeat(num_running=num_running))
        for _ in range(round(interval_s / 0.25)):
            clock.advance(0.25)
            num_before = len(decode.of(RouterBeat))
            pool.count_missed_beats()
            assert len(decode.of(RouterBeat)) == num_before
    assert decode.of(RouterBeat) == [RouterBeat(INTERVALS_AT_REST)] * 20


def test_the_router_sends_beats_to_a_node_whose_beats_are_late() -> None:
    """In a storm of joins, beats wait in queues; nodes must not take the router for dead."""
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat())
    decode.commands.clear()
    for _ in range(20):
        clock.advance(0.25)
        decode.say()
        pool.count_missed_beats()
    assert len(decode.of(RouterBeat)) == 6  # every 0.75 s


def is_lost_after(pool: NodePool, hand: HandNode) -> int:
    """Return after how many intervals without a message the pool removes a node."""
    hand.say()
    for number in range(100):
        if hand.node not in pool.nodes:
            return number
        pool.count_missed_beats()
    raise AssertionError("the node is never lost")


def test_nodes_at_rest_beat_less_often_in_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat_watch, "BEATS_AT_REST_PER_S", 16.0)
    clock = VirtualClock()
    pool, hands, found = make_pool(clock=clock), list[HandNode](), []
    for number in range(8):
        hands += join_pair(pool, number)
        clock.advance(5.0)
        for hand in hands:
            hand.say()
        pool.count_missed_beats()
        (told,) = {hand.of(RouterBeat)[-1].intervals_at_rest for hand in hands}
        found.append(told)
    assert found == [2, 2, 2, 2, 3, 3, 4, 4]  # 2 to 16 nodes
    newcomer, _ = join_pair(pool, 8)
    assert newcomer.node.intervals_at_rest == 4


def test_peers_of_the_first_nodes_count_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, a router learns from the first node's reports how large the fleet is."""
    monkeypatch.setattr(beat_watch, "BEATS_AT_REST_PER_S", 16.0)
    pool = make_pool()
    said = dataclasses.replace(make_registration("p0", NodeRole.PREFILL), batches_peers=True)
    hand = HandNode(pool, said)
    assert hand.node.intervals_at_rest == 2
    peers = tuple(PeerReport(f"d{number}-0", True, "t", "", 5.0) for number in range(20))
    pool.on_event(hand.node, PeerReports(peers))
    pool.count_missed_beats()
    assert hand.of(RouterBeat) == [RouterBeat(4)]
    hand.leave()
    pool.count_missed_beats()
    _, decode = join_pair(pool)
    assert decode.node.intervals_at_rest == 2


@pytest.mark.parametrize(("intervals", "at_rest", "busy"), [(2, 7, 6), (3, 10, 6), (4, 13, 6)])
def test_silence_is_noticed_later_if_nodes_at_rest_beat_less_often(
    intervals: int, at_rest: int, busy: int
) -> None:
    for num_running, expected in ((0, at_rest), (1, busy)):
        pool = make_pool()
        _, decode = join_pair(pool)
        pool.on_event(decode.node, NodeBeat(num_running=num_running))
        decode.node.intervals_at_rest = intervals
        for _ in range(3 if num_running else intervals + 1):
            pool.count_missed_beats()
            assert not decode.node.is_silent
        pool.count_missed_beats()
        assert decode.node.is_silent
        assert is_lost_after(pool, decode) == expected
