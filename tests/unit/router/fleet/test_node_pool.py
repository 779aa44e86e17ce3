"""Unit tests of NodePool: which nodes may join, which are paired, and how legs end."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from baton.api.outputs import FinishReason
from baton.link.words import (
    KVCacheEvents,
    NodeBeat,
    NodeRegistration,
    NodeRole,
    PeerUpdate,
    RequestError,
    SendKVSnapshot,
    ServingState,
)
from router.fleet.node import STALLED_FACTOR, STALLED_S, LegDelta, LegWork, Node
from router.fleet.node_pool import NodePool
from router.fleet.peers.pairing import incompatibility
from tests.fakes.router.nodes import (
    HandNode,
    failure,
    join_pair,
    make_pool,
    make_registration,
    token,
)
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE


def pairs_of(pool: NodePool) -> list[tuple[str, str]]:
    """Names of all pairs that may be used."""
    return [
        (prefill.node_name, decode.node_name)
        for prefill in pool.fleet.prefills
        for decode in pool.fleet.reached_by(prefill)
        if pool.fleet.reaches(prefill, decode)
    ]


# ---------------------------------------------------------------- who may join


def test_a_node_of_this_model_may_join() -> None:
    assert make_pool().refusal(make_registration("p", P)) == ""


def test_a_node_of_another_model_is_refused_and_both_models_are_named() -> None:
    refusal = make_pool().refusal(make_registration("p", P, differs={"model": "other"}))
    assert refusal.startswith("model: p has a model with configuration other")
    assert "digest" in refusal


def test_a_node_that_does_not_say_its_model_is_refused() -> None:
    registration = make_registration("p", P)
    registration.compatibility.clear()
    assert make_pool().refusal(registration).startswith("model: ")


def test_a_node_without_a_name_is_refused() -> None:
    assert "node_name" in make_pool().refusal(make_registration("", P))


def test_a_node_whose_broken_link_we_have_not_noticed_yet_may_join_again() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    assert pool.refusal(prefill.node.registration) == ""
    again = HandNode(pool, prefill.node.registration)
    assert [node.engine_id for node in pool.nodes] == ["d0-0", "p0-0"]
    assert pool.node("p0-0") is again.node
    prefill.leave()  # the old link ends at last: the new one must not go with it
    assert pool.node("p0-0") is again.node
    again.reach(decode)
    assert pairs_of(pool) == [("p0", "d0")]


# ---------------------------------------------------------------- introductions


def test_nodes_of_different_roles_are_introduced_to_each_other_and_equals_are_not() -> None:
    pool = make_pool()
    p0, p1 = (HandNode(pool, make_registration(name, P)) for name in ("p0", "p1"))
    assert p0.commands == p1.commands == []
    d0 = HandNode(pool, make_registration("d0", D))
    assert p0.commands == p1.commands == [PeerUpdate("d0-0", b"info of d0-0")]
    assert d0.commands == [PeerUpdate("p0-0", b"info of p0-0"), PeerUpdate("p1-0", b"info of p1-0")]


@pytest.mark.parametrize("key", ["dtype", "kv_cache_dtype", "block_size", "weights"])
def test_incompatible_nodes_are_not_introduced_and_what_differs_is_named(key: str) -> None:
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", P))
    decode = HandNode(pool, make_registration("d", D, differs={key: "odd"}))
    assert prefill.commands == decode.commands == []
    assert pairs_of(pool) == []
    expected = f"{key} differs: d has odd, p has "
    assert f"{key} differs: " in pool.why_no_pair()
    assert expected in prefill.node.reports["d-0"].problem
    assert expected in decode.node.reports["p-0"].problem


def test_incompatibility_names_the_first_thing_that_differs_and_nothing_when_equal() -> None:
    one = make_registration("a", P, differs={"b": "1", "c": "1"})
    assert incompatibility(one, make_registration("b", D, differs={"b": "1", "c": "1"})) == ""
    problem = incompatibility(one, make_registration("b", D, differs={"b": "2", "c": "2"}))
    assert problem == "b differs: a has 1, b has 2"


def test_the_same_process_takes_the_place_of_its_own_link_and_its_peers_learn_of_both() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    again = HandNode(pool, decode.node.registration)
    assert decode.is_hung_up
    assert [node.engine_id for node in pool.nodes] == ["d0-0", "p0-0"]
    assert prefill.of(PeerUpdate)[1:] == [
        PeerUpdate("d0-0", removed=True),
        PeerUpdate("d0-0", b"info of d0-0"),
    ]
    assert again.of(PeerUpdate) == [PeerUpdate("p0-0", b"info of p0-0")]
    assert pairs_of(pool) == []  # the new one is not connected yet


# ---------------------------------------------------------------- pairs


def test_there_is_no_pair_before_the_prefill_node_says_that_it_is_connected() -> None:
    pool = make_pool()
    assert pool.why_no_pair() == "no prefill node has joined the router"
    prefill = HandNode(pool, make_registration("p", P))
    assert pool.why_no_pair() == "no decode node has joined the router"
    decode = HandNode(pool, make_registration("d", D))
    assert pairs_of(pool) == []
    assert "not connected" in pool.why_no_pair() or "no prefill node is connected" in (
        pool.why_no_pair()
    )
    decode.reach(prefill)
    assert pairs_of(pool) == []  # hearing is not yet being able to write
    prefill.reach(decode)
    assert pairs_of(pool) == [("p", "d")]
    prefill.reach(decode, connected=False, problem="no route")
    assert pairs_of(pool) == []
    assert pool.why_no_pair() == "p and d are not paired: no route"


def test_a_pair_is_gone_as_soon_as_either_node_left() -> None:
    for index in (0, 1):
        pool = make_pool()
        join_pair(pool)[index].leave()
        assert pairs_of(pool) == []


def test_the_longest_request_is_what_some_pair_takes() -> None:
    pool = make_pool(max_model_len=90)
    assert pool.max_model_len == 90
    prefill = HandNode(pool, make_registration("p", P, max_model_len=80))
    short = HandNode(pool, make_registration("d0", D, max_model_len=50))
    prefill.reach(short)
    assert pool.max_model_len == 50
    decode = HandNode(pool, make_registration("d1", D, max_model_len=70))
    assert pool.max_model_len == 50  # nobody reaches it yet
    prefill.reach(decode)
    assert pool.max_model_len == 70
    decode.leave()
    assert pool.max_model_len == 50
    short.leave()
    assert pool.max_model_len == 50  # of the last pair that there was


def test_a_node_that_is_in_no_pair_does_not_say_what_the_router_takes() -> None:
    pool = make_pool(max_model_len=90)
    join_pair(pool)
    for name, role, differs in (("p", P, {}), ("d", D, {"dtype": "other"}), ("d9", D, {})):
        HandNode(pool, make_registration(name, role, max_model_len=2, differs=differs))
        assert pool.max_model_len == 90


def test_a_request_goes_where_it_is_not_cut_short() -> None:
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", P, max_model_len=100))
    for name, length in (("d0", 50), ("d1", 100)):
        prefill.reach(HandNode(pool, make_registration(name, D, max_model_len=length)))

    def names(num_tokens: int, at_end: int) -> list[str]:
        return [node.node_name for node in pool.fleet.with_room_for(num_tokens, at_end).decodes]

    assert names(10, 50) == ["d0", "d1"]
    assert names(10, 51) == names(10, 1000) == names(51, 51) == ["d1"]
    assert names(101, 101) == []


def test_a_beat_replaces_the_one_before() -> None:
    pool = make_pool()
    prefill, _ = join_pair(pool)
    pool.on_event(prefill.node, NodeBeat(num_running=3))
    assert prefill.node.beat.num_running == 3


# ---------------------------------------------------------------- legs


class Reader:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.taken: list[LegDelta | tuple[NodeRole, int, int]] = []

    def on_leg_delta(self, item: LegDelta) -> None:
        self.taken.append(item)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None:
        self.taken.append((role, output_index, token_id))

    @property
    def failure(self) -> tuple[LegDelta, RequestError]:
        """The one thing that was taken."""
        [item] = self.taken
        assert isinstance(item, LegDelta)
        assert item.delta.error is not None
        return item, item.delta.error


def open_leg(node: Node, request_id: str, epoch: int = 1) -> Reader:
    reader = Reader()
    node.open_leg(request_id, epoch, reader, LegWork(num_tokens=10))
    return reader


def test_a_delta_goes_to_the_leg_of_its_request_and_epoch_and_to_no_other() -> None:
    _, decode = join_pair(make_pool())
    old, new = open_leg(decode.node, "a", 1), open_leg(decode.node, "a", 2)
    other = open_leg(decode.node, "b", 3)
    last = token("a", 2, 6, epoch=2, finish=FinishReason.STOP)
    decode.say(token("a", 1, 5, epoch=2), last, failure("a", "UNAVAILABLE", "x", epoch=3))
    assert new.taken == [(D, 1, 5), LegDelta(D, last)]
    assert old.taken == other.taken == []


def test_deltas_of_closed_and_of_unknown_legs_are_dropped() -> None:
    _, decode = join_pair(make_pool())
    reader = open_leg(decode.node, "a")
    decode.node.close_leg(1)
    decode.node.close_leg(1)
    decode.say(token("a", 1, 5, epoch=1), token("nobody", 1, 5, epoch=1))
    decode.say(failure("a", "UNAVAILABLE", "late", epoch=1))
    assert reader.taken == []


def test_open_legs_are_counted_with_their_tokens_and_closed_ones_are_not() -> None:
    pool = make_pool()
    _, decode = join_pair(pool)
    open_leg(decode.node, "a")
    open_leg(decode.node, "b", 2)
    state = pool.fleet.decodes[0]
    assert (state.num_open_requests, state.num_open_tokens) == (2, 20)
    decode.node.close_leg(1)
    decode.node.close_leg(1)
    state = pool.fleet.decodes[0]
    assert (state.num_open_requests, state.num_open_tokens) == (1, 10)


def test_when_a_node_leaves_its_legs_fail_its_peers_hear_it_and_others_go_on() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    lost, kept = open_leg(decode.node, "a"), open_leg(prefill.node, "a")
    decode.leave()
    decode.leave()  # link and reader both say so
    item, error = lost.failure
    assert item.role is D
    assert (error.code, error.message) == ("UNAVAILABLE", "decode node d0 went away")
    assert kept.taken == []
    assert prefill.of(PeerUpdate)[-1] == PeerUpdate("d0-0", removed=True)
    assert prefill.node.reports == {}


# ---------------------------------------------------------------- beats


def test_a_node_whose_link_breaks_is_missing_until_it_is_back_and_one_that_drained_is_not() -> None:
    """No alert said that a node had been killed: only silent ones were shown as lost."""
    pool = make_pool()
    _, decode = join_pair(pool)
    decode.leave()
    assert [lost.node_name for lost in pool.lost] == ["d0"]
    again = HandNode(pool, dataclasses.replace(make_registration("d0", D), engine_id="d0-1"))
    assert pool.lost == []
    pool.on_event(again.node, NodeBeat(serving_state=ServingState.DRAINING))
    again.leave()
    assert pool.lost == []


@pytest.mark.parametrize("is_counted_first", [False, True])
def test_nodes_that_hang_up_on_a_router_that_stood_still_did_not_die(
    is_counted_first: bool,
) -> None:
    """A router that got little of the processor took its requests for what its nodes died of."""
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    prefill, decode = join_pair(pool)
    pool.count_missed_beats()
    clock.advance(2.4)
    if is_counted_first:
        pool.count_missed_beats()
    decode.leave()
    assert pool.lost_nodes.lost_since(0) == []
    assert [lost.node_name for lost in pool.lost] == ["d0"]
    again = HandNode(pool, decode.node.registration)
    for _ in range(5):
        for node in (prefill, again):
            pool.on_event(node.node, NodeBeat())
        pool.count_missed_beats()
        clock.advance(0.25)
    again.leave()  # this time by itself
    [loss] = pool.lost_nodes.lost_since(0)
    assert loss.engine_id == "d0-0"


@pytest.mark.parametrize(("num_running", "num_counts"), [(1, 5), (0, 6)])
def test_a_node_that_misses_four_beats_is_lost_and_hung_up_on(
    num_running: int, num_counts: int
) -> None:
    """A node at rest beats half as often, so one more interval without a beat is no sign."""
    pool = make_pool()
    prefill, decode = join_pair(pool)
    pool.on_event(decode.node, NodeBeat(num_running=num_running))
    hung_up: list[str] = []
    decode.node.hang_up = lambda: hung_up.append("d0")
    reader = open_leg(decode.node, "a")
    for _ in range(num_counts):
        assert pairs_of(pool) == [("p0", "d0")]
        pool.on_event(prefill.node, NodeBeat())
        pool.count_missed_beats()
    pool.on_event(prefill.node, NodeBeat())
    pool.count_missed_beats()
    assert hung_up == ["d0"]
    assert [node.name for node in pool.nodes] == ["p0"]
    assert [registration.node_name for registration in pool.lost] == ["d0"]
    item, error = reader.failure
    assert item.node_lost
    assert error.message == "decode node d0 is silent (missed 4 beats)"
    assert prefill.of(PeerUpdate)[-1] == PeerUpdate("d0-0", removed=True)
    again = HandNode(pool, decode.node.registration)
    assert pool.lost == []
    assert again.of(PeerUpdate) == [PeerUpdate("p0-0", b"info of p0-0")]


def test_what_is_missing_is_waited_for_only_after_both_roles_were_there() -> None:
    pool = make_pool()
    prefill = HandNode(pool, make_registration("p", P))
    assert not pool.expects_pair
    prefill.leave()
    HandNode(pool, make_registration("d", D))
    assert pool.expects_pair


def test_who_waits_for_a_change_hears_of_each_kind() -> None:
    async def run() -> None:
        pool = make_pool()
        prefill, decode = join_pair(pool)
        for change in (
            lambda: prefill.reach(decode, connected=False),
            decode.leave,
            lambda: HandNode(pool, decode.node.registration),
        ):
            waiting = asyncio.create_task(pool.wait_for_change())
            await asyncio.sleep(0)
            pool.on_event(prefill.node, NodeBeat())
            await asyncio.sleep(0)
            assert not waiting.done()
            change()
            await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


# ---------------------------------------------------------------- the fleet


def test_a_fleet_stays_the_same_until_nodes_or_their_peers_change() -> None:
    pool = make_pool()
    prefill, decode = join_pair(pool)
    fleet = pool.fleet
    pool.on_event(decode.node, NodeBeat(num_running=1))
    open_leg(decode.node, "a")
    assert pool.fleet is fleet
    prefill.reach(decode, connected=False)
    assert pool.fleet is not fleet
    assert not pool.fleet


def test_reach_is_kept_as_nodes_come_and_go() -> None:
    pool = make_pool()
    (p0, d0), (p1, d1) = join_pair(pool, 0), join_pair(pool, 1)
    p0.reach(d1)
    d1.reach(p1, problem="cannot hear it")
    assert pairs_of(pool) == [("p0", "d0"), ("p0", "d1")]
    d0.leave()
    assert pairs_of(pool) == [("p0", "d1")]
    d1.reach(p1)
    assert pairs_of(pool) == [("p0", "d1"), ("p1", "d1")]
    p1.reach(p0)  # nonsense from the network
    p1.reach(d0)
    assert pairs_of(pool) == [("p0", "d1"), ("p1", "d1")]


def test_a_node_that_is_not_eligible_gets_nothing_until_it_is() -> None:
    refused = {"p0"}
    pool = make_pool(eligibility=[lambda node: node.name not in refused])
    (p0, d0), (p1, _) = join_pair(pool, 0), join_pair(pool, 1)
    p1.reach(d0)
    assert pairs_of(pool) == [("p1", "d0"), ("p1", "d1")]
    refused.clear()
    pool.note_eligibility_change()
    assert ("p0", "d0") in pairs_of(pool)
    assert pool.node(p0.engine_id) is p0.node


# ---------------------------------------------------------------- prefix caches


def caching(name: str, prefix_hash: str = "xxh3_128", incarnation: int = 0) -> NodeRegistration:
    registration = make_registration(name, P, incarnation=incarnation)
    return dataclasses.replace(registration, prefix_hash=prefix_hash)


def test_a_node_is_asked_for_its_prefix_cache_when_it_joins_and_after_a_gap() -> None:
    pool = make_pool()
    node = HandNode(pool, caching("p"))
    assert len(node.of(SendKVSnapshot)) == 1
    pool.on_event(node.node, KVCacheEvents(1, True, (1, 2)))
    pool.on_event(node.node, KVCacheEvents(2, False, (3,)))
    assert pool.prefix_index.match([1, 2, 3]) == {"p-0": 3}
    assert len(node.of(SendKVSnapshot)) == 1
    pool.on_event(node.node, KVCacheEvents(4, False, (), (1,)))
    assert len(node.of(SendKVSnapshot)) == 2
    assert pool.prefix_index.match([1, 2, 3]) == {}


@pytest.mark.parametrize("prefix_hash", ["", "of a later version"])
def test_a_node_whose_names_nobody_here_could_compute_is_not_asked(prefix_hash: str) -> None:
    pool = make_pool()
    node = HandNode(pool, caching("p", prefix_hash))
    assert node.of(SendKVSnapshot) == []
    pool.on_event(node.node, KVCacheEvents(1, True, (1,)))
    assert pool.prefix_index.match([1]) == {}


def test_with_a_node_goes_what_it_had_and_its_next_start_is_asked_anew() -> None:
    pool = make_pool()
    node = HandNode(pool, caching("p"))
    pool.on_event(node.node, KVCacheEvents(1, True, (1,)))
    again = HandNode(pool, caching("p", incarnation=1))
    assert pool.prefix_index.match([1]) == {}
    pool.on_event(node.node, KVCacheEvents(2, False, (2,)))  # was on its way
    pool.on_event(again.node, KVCacheEvents(1, True, (1,)))
    assert pool.prefix_index.match([1]) == {"p-1": 1}
    again.leave()
    assert pool.prefix_index.match([1]) == {}


def test_a_node_whose_prompts_get_no_further_is_ejected() -> None:
    clock = VirtualClock(100_000.0)
    pool = make_pool(clock=clock)
    prefill, _ = join_pair(pool)
    prefill.node.open_leg("a", 1, Reader(), LegWork(num_tokens=10, num_uncomputed=10))
    clock.advance(STALLED_S - 1)
    prefill.node.watch()
    assert not prefill.node.health.is_unwanted(0)
    clock.advance(STALLED_S + STALLED_FACTOR * prefill.node.load.prefill_queue_s + 1)
    prefill.node.watch()
    assert prefill.node.health.is_unwanted(0)


def test_a_node_that_computes_prompts_of_other_routers_is_not_ejected() -> None:
    clock = VirtualClock(100_000.0)
    pool = make_pool(clock=clock)
    prefill, _ = join_pair(pool)
    open_leg(prefill.node, "a")  # all of its prompt is cached there
    pool.on_event(prefill.node, NodeBeat(num_uncomputed_tokens=1000))
    clock.advance(1000)
    prefill.node.watch()
    assert not prefill.node.health.is_unwanted(0)
