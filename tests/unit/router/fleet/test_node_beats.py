"""Unit tests of beats at the router: which nodes are lost, and which beats are answered."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.words import NodeBeat, NodeRole, PeerReport, PeerReports, RouterBeat
from router import program
from router.fleet.load import beat_watch
from router.fleet.node import LegDelta, LegWork
from router.fleet.node_pool import NodePool
from router.gate.scaling import ScalingSignals
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop


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


@pytest.mark.parametrize("at_s", [0.01, 0.2, 0.3, 0.49])
def test_a_router_counts_beats_rarely_while_all_nodes_rest_and_loses_silent_nodes_in_time(
    at_s: float,
) -> None:
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    pool = make_pool(clock=clock)
    join_pair(pool)
    counted_at: list[float] = []
    count = pool.count_missed_beats

    def note_count(num_intervals: int = 1) -> None:
        counted_at.append(clock())
        count(num_intervals)

    async def run() -> float:
        async with program._watching(pool, ScalingSignals(pool, clock=clock)):
            await asyncio.sleep(at_s)
            for _ in range(10):
                for node in list(pool.members):
                    pool.on_event(node, NodeBeat())
                await asyncio.sleep(0.5)
            assert pool.num_nodes == 2
            before_s = clock() - 0.5
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if not pool.num_nodes:
                    break
            return clock() - before_s

    pool.count_missed_beats = note_count  # type: ignore[method-assign]  # notes each call
    try:
        task = loop.create_task(run())
        loop.run_until_idle()
        while not task.done():
            clock.advance(loop.idle_s)
            loop.run_until_idle()
    finally:
        loop.close()
    assert 1.49 <= task.result() <= 1.77
    assert sum(1001 < one <= 1005 for one in counted_at) == 8


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


def test_nodes_of_all_models_of_a_router_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat_watch, "BEATS_AT_REST_PER_S", 16.0)
    pool, other = make_pool(), make_pool()
    other.gate = pool.gate
    for number in range(6):
        join_pair(pool, number)
    _, decode = join_pair(other, 6)
    decode.node.answered_at = -math.inf
    other.count_missed_beats()
    assert decode.of(RouterBeat)[-1] == RouterBeat(4)


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


class Nobody:
    """A reader of deltas, of which only the loss of the node comes."""

    def on_leg_delta(self, item: LegDelta) -> None:
        assert item.node_lost

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        raise AssertionError("a silent node sends no token")


@pytest.mark.parametrize("intervals", [2, 4])
def test_silence_of_a_node_at_rest_is_noticed_soon_once_it_got_a_request(intervals: int) -> None:
    """The last beat came long before the request, so the node is not late yet."""
    pool = make_pool()
    _, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat())
    decode.node.intervals_at_rest = intervals
    for _ in range(intervals):
        pool.count_missed_beats()
    for number in range(2):  # a second request does not postpone the loss
        decode.node.open_leg(f"r{number}", number, Nobody(), LegWork(num_tokens=5))
        for _ in range(2):
            pool.count_missed_beats()
            assert decode.node in pool.nodes
    pool.count_missed_beats()
    assert decode.node not in pool.nodes


@pytest.mark.parametrize(("intervals", "at_rest"), [(2, 7), (3, 10), (4, 13)])
def test_a_request_does_not_postpone_the_loss_of_a_silent_node_at_rest(
    intervals: int, at_rest: int
) -> None:
    """Regression: a node that was to be lost at the next count got five more."""
    pool = make_pool()
    _, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat())
    decode.node.intervals_at_rest = intervals
    for _ in range(at_rest - 1):
        pool.count_missed_beats()
    assert decode.node in pool.nodes
    decode.node.open_leg("r", 0, Nobody(), LegWork(num_tokens=5))
    assert decode.node.is_silent
    pool.count_missed_beats()
    assert decode.node not in pool.nodes


def test_a_request_does_not_postpone_the_loss_of_a_silent_busy_node() -> None:
    """Regression: each first request after a message set the missed beats back to one."""
    pool = make_pool()
    _, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat(num_running=1))
    for _ in range(3):
        pool.count_missed_beats()
    decode.node.open_leg("r", 0, Nobody(), LegWork(num_tokens=5))
    for _ in range(2):
        pool.count_missed_beats()
        assert decode.node in pool.nodes
    pool.count_missed_beats()
    assert decode.node not in pool.nodes
