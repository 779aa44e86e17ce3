"""Test nodes that are kept for one suspect at a time, and ordinary requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from baton.api.outputs import FinishReason
from baton.api.sampling_params import SamplingParams
from baton.link.words import CancelCommand, DecodeCommand, NodeRole, PrefillCommand
from router.calls.recovery import trial_rooms
from router.calls.recovery.retry_budget import RetryOptions
from router.calls.recovery.trial_rooms import TrialRooms
from router.fleet.fleet import Fleet
from router.fleet.node import LegDelta, LegWork
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, token
from tests.fakes.router.router_scene import Scene
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop

OPTIONS = RetryOptions(first_pause_s=0.001, longest_pause_s=0.002)


class Reader:
    """Record the outcome of one leg."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def on_leg_delta(self, item: LegDelta) -> None:
        assert item.delta.error is not None
        self.codes.append(item.delta.error.code)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        raise AssertionError


class Rooms:
    """The rooms of a pool with so many pairs of nodes, on virtual time."""

    def __init__(self, num_pairs: int) -> None:
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.pool = make_pool(clock=self.clock)
        pairs = [join_pair(self.pool, number) for number in range(num_pairs)]
        self.prefills, self.decodes = [p for p, _ in pairs], [d for _, d in pairs]
        for prefill in self.prefills:
            for decode in self.decodes:
                prefill.reach(decode)
        self.rooms = TrialRooms(self.pool)

    def acquire(self, owner: object, *, prefill: bool = False) -> str:
        fleet = self.pool.fleet
        with self.loop.entered():
            return self.rooms.acquire(owner, fleet.prefills if prefill else fleet.decodes)

    def release(self, owner: object) -> None:
        with self.loop.entered():
            self.rooms.release(owner)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.loop.run_until_idle()

    def left(self, owner: object | None = None) -> Fleet:
        return self.rooms.without(self.pool.fleet, owner)


@pytest.fixture
def make_rooms() -> Iterator[Callable[[int], Rooms]]:
    made: list[Rooms] = []

    def make(num_pairs: int) -> Rooms:
        made.append(Rooms(num_pairs))
        return made[-1]

    yield make
    for rooms in made:
        rooms.loop.close()


def open_legs(hand: HandNode, count: int) -> Reader:
    reader = Reader()
    for number in range(count):
        hand.node.open_leg(f"r{number}", number, reader, LegWork(num_tokens=10))
    return reader


def names(fleet: Fleet) -> list[str]:
    return [node.node_name for node in (*fleet.prefills, *fleet.decodes)]


def test_an_idle_node_is_kept_at_once_and_for_its_owner_only(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(2)
    open_legs(site.decodes[0], 1)
    assert site.acquire("a") == "d1-0"
    assert names(site.left()) == ["p0", "p1", "d0"]
    assert names(site.left("a")) == ["p0", "p1", "d0", "d1"]
    assert site.acquire("a") == "d1-0"  # the same node


def test_requests_of_a_busy_node_have_a_moment_to_end_and_are_moved_then(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(2)
    readers = [open_legs(site.decodes[0], 3), open_legs(site.decodes[1], 2)]
    assert site.acquire("a") == ""
    assert names(site.left()) == ["p0", "p1", "d0"]
    site.pass_time(trial_rooms.QUIESCE_S - 0.1)
    assert site.acquire("a") == ""
    assert readers[1].codes == []
    site.pass_time(0.2)
    site.acquire("a")
    assert readers[1].codes == ["PREEMPTED", "PREEMPTED"]
    assert readers[0].codes == []
    for epoch in range(2):
        site.decodes[1].node.close_leg(epoch)  # as their attempts do
    assert site.acquire("a") == "d1-0"


def test_a_room_is_handed_over_or_opened(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(2)
    room = site.acquire("a")
    site.release("a")
    assert names(site.left()) != ["p0", "p1", "d0", "d1"]  # the next suspect may come
    assert site.acquire("b") == room
    site.pass_time(2 * trial_rooms.HAND_OVER_S)
    assert site.rooms
    site.release("b")
    site.pass_time(2 * trial_rooms.HAND_OVER_S)
    assert not site.rooms
    assert names(site.left()) == ["p0", "p1", "d0", "d1"]


def test_no_room_is_kept_for_long(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(1)
    assert site.acquire("a")
    assert not site.left()
    site.pass_time(trial_rooms.MAX_KEPT_S + 0.1)
    assert names(site.left()) == ["p0", "d0"]


def test_a_node_that_was_kept_for_long_rests_before_it_is_kept_again(
    make_rooms: Callable[[int], Rooms],
) -> None:
    """Regression: the next suspect kept the only node at once, and ordinary requests waited on."""
    site = make_rooms(1)
    assert site.acquire("a")
    site.pass_time(trial_rooms.MAX_KEPT_S + 0.1)
    assert site.acquire("b") == ""
    site.pass_time(trial_rooms.REST_S - 0.2)
    assert site.acquire("b") == ""
    assert names(site.left()) == ["p0", "d0"]
    site.pass_time(0.2)
    assert site.acquire("b") == "d0-0"


def test_a_second_room_costs_nobody_anything(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(3)
    for decode in site.decodes[1:]:
        open_legs(decode, 1)
    assert site.acquire("a") == "d0-0"
    assert site.acquire("b") == ""  # both other nodes are at work
    assert names(site.left()) == ["p0", "p1", "p2", "d1", "d2"]
    site.decodes[1].node.close_leg(0)
    assert site.acquire("b") == "d1-0"
    site.decodes[2].node.close_leg(0)
    assert site.acquire("c") == ""  # some node has to do the other requests' work


def test_trials_on_both_sides_do_not_wait_for_each_other(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(1)
    assert site.acquire("a") == "d0-0"
    assert site.acquire("b", prefill=True) == ""  # "a" needs the only prefill node
    site.release("a")
    site.pass_time(2 * trial_rooms.HAND_OVER_S)
    assert site.acquire("b", prefill=True) == "p0-0"


def test_a_room_whose_node_dies_is_none(
    make_rooms: Callable[[int], Rooms],
) -> None:
    site = make_rooms(2)
    room = site.acquire("a")
    next(hand for hand in site.decodes if hand.engine_id == room).leave()
    assert site.acquire("a") not in ("", room)


def test_ordinary_requests_wait_where_there_is_no_other_node() -> None:
    """After the trial, requests of the node go on there, and new ones begin there."""

    async def run() -> None:
        scene = Scene(options=OPTIONS)
        rooms, fleet = scene.dispatcher.recoveries.suspects.rooms, scene.pool.fleet
        await scene.call(params=SamplingParams(max_tokens=3, seed=1))
        [begun] = scene.decode.of(DecodeCommand)
        scene.prefill.say(token("a", 0, 0, epoch=begun.epoch))
        await scene.pause()
        assert rooms.acquire("suspect", fleet.decodes) == ""
        await asyncio.sleep(trial_rooms.QUIESCE_S)
        async with asyncio.timeout(3):  # a node is kept for 5 s at most
            while not (room := rooms.acquire("suspect", fleet.decodes)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert room == scene.decode.engine_id
        assert scene.decode.of(CancelCommand) == [CancelCommand("a", begun.epoch)]
        assert len(scene.prefill.of(PrefillCommand)) == 1
        rooms.release("suspect")
        async with asyncio.timeout(3):
            while len(scene.decode.of(DecodeCommand)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        _, again = scene.decode.of(DecodeCommand)
        assert again.output_token_ids == (0,)
        scene.prefill.say(token("a", 1, 1, epoch=again.epoch))
        finish = FinishReason.LENGTH
        scene.decode.say(token("a", 2, 2, epoch=again.epoch, finish=finish))
        await scene.end()
        assert scene.token_ids == [0, 1, 2]

    asyncio.run(run())
