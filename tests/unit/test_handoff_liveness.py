"""Drills of the hand-off on a virtual clock: nodes that are silent, stand still and come back."""

from __future__ import annotations

import pytest

from baton.link.words import AbortAll
from baton.telemetry.ledger import BlockOwner
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.actions import Action, Input, PauseEnded
from kvconnector.protocol.messages import (
    Commit,
    Digests,
    Grant,
    Message,
    Resend,
    Start,
    Verified,
)
from kvconnector.protocol.peers import BEAT_INTERVAL_S, LEASE_S, RECEIVING_LEASE_S
from kvconnector.protocol.seals import peek
from tests.fakes.handoff.handoff_cluster import Cluster
from tests.property.test_handoff import assert_clean, make_cluster, prompt_of
from tests.unit.test_handoff import (
    GREEDY,
    assert_right,
    deliver_all,
    go_on,
    place,
    prefill_without_grant,
    run_until_writing,
)

TIMEOUT_S = 1e6  # of `Cluster.place`


def pass_time(cluster: Cluster, seconds: float) -> None:
    """Advance the clock beat by beat; posted writes stay incomplete, everything else goes on."""
    for _ in range(round(seconds / BEAT_INTERVAL_S)):
        cluster.clock.advance(BEAT_INTERVAL_S)
        for _ in range(2):
            go_on(cluster)
            deliver_all(cluster)


def connected(cluster: Cluster) -> list[bool]:
    return [report.connected for report in cluster.reports]


def test_a_slow_write_does_not_make_anybody_suspect() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    run_until_writing(cluster)
    pass_time(cluster, 20)
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert all(connected(cluster))
    assert_clean(cluster)


def test_a_prefill_node_that_stood_still_writes_nothing_of_before() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 17)
    run_until_writing(cluster)
    cluster.stopped.add("p")
    pass_time(cluster, 5)
    assert cluster.attempts["a", 1].error == "decode: its prefill node cannot be reached"
    assert cluster.d.beat().num_quarantined_blocks > 0  # what it has posted may still land
    posted = list(cluster.network.writes)
    cluster.stopped.clear()
    for _ in range(20):
        go_on(cluster)
        deliver_all(cluster)
    assert cluster.network.writes == posted
    assert cluster.d.beat().num_quarantined_blocks > 0
    cluster.settle()
    assert cluster.d.beat().num_quarantined_blocks == 0
    assert_clean(cluster)
    place(cluster, "b", 17)  # both are as before, and nobody was started anew
    cluster.settle()
    assert cluster.attempts["b", 1].is_complete
    assert connected(cluster).count(False) == 2
    assert connected(cluster)[-2:] == [True, True]
    assert_right(cluster)


def test_blocks_of_a_prefill_node_that_died_come_back_though_no_router_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = make_cluster(20)
    monkeypatch.setattr(PeerProcess, "has_ended", lambda peer: peer.engine_id in cluster.dead)
    place(cluster, "a", 17)
    run_until_writing(cluster)
    cluster.d.submit(AbortAll("the link to the router broke"))
    cluster.kill("p", told=False)
    go_on(cluster)
    assert cluster.d.beat().num_quarantined_blocks > 0
    cluster.settle()
    assert_clean(cluster)


def test_a_decode_node_that_stood_still_finds_its_requests_ended_and_goes_on() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 17)
    run_until_writing(cluster)
    cluster.stopped.add("d")
    pass_time(cluster, 5)
    assert connected(cluster) == [True, True, False]
    while cluster.network.writes:
        cluster.network.land(0)
    pass_time(cluster, 1)
    assert cluster.sender.machine.transfers == {}
    cluster.stopped.clear()
    cluster.settle()
    assert "no beat from d for" in cluster.attempts["a", 1].error
    assert_clean(cluster)
    place(cluster, "b", 17)
    cluster.settle()
    assert cluster.attempts["b", 1].is_complete
    assert connected(cluster)[-1]


@pytest.mark.parametrize("seconds", [LEASE_S / 2, LEASE_S])
def test_a_process_that_stands_still_just_before_a_post_looks_at_its_lease(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(20)
    machine = cluster.sender.machine
    take = machine.handle_input
    stops = [seconds]

    def stand_still(item: Input, now: float) -> list[Action]:
        may_post = any(t.granted and t.pushes for t in machine.transfers.values())
        if isinstance(item, PauseEnded) and may_post and stops:
            cluster.clock.advance(stops.pop())  # behind all other checks of this round
        return take(item, cluster.clock())

    monkeypatch.setattr(machine, "handle_input", stand_still)
    place(cluster, "a", 17)
    for _ in range(20):
        go_on(cluster)
        deliver_all(cluster)
    assert not stops
    assert bool(cluster.network.writes) == (seconds < LEASE_S)
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete == (seconds < LEASE_S)
    assert_clean(cluster)


def test_silence_in_one_direction_ends_transfers_on_both_sides() -> None:
    for deaf in "pd":
        cluster = make_cluster(20)
        place(cluster, "a", 17)
        run_until_writing(cluster)
        for _ in range(1 + round(RECEIVING_LEASE_S / BEAT_INTERVAL_S)):
            cluster.clock.advance(BEAT_INTERVAL_S)
            for _ in range(2):
                go_on(cluster)
                messages = cluster.network.messages
                messages[:] = [message for message in messages if message.target != deaf]
                deliver_all(cluster)
        assert False in connected(cluster)
        assert cluster.d.beat().num_quarantined_blocks > 0 or deaf == "p"
        cluster.settle()
        assert cluster.attempts["a", 1].error
        assert connected(cluster)[-1]
        assert_clean(cluster)


@pytest.mark.parametrize("kind", [Start, Grant, Commit])
def test_a_request_whose_message_is_lost_ends_soon_and_not_at_its_deadline(
    kind: type[Message],
) -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 17)
    lost = None
    messages = cluster.network.messages
    for _ in range(100):
        go_on(cluster)
        for message in list(messages):
            if lost is None and isinstance(peek(message.payload), kind):
                messages.remove(message)
                lost = message
        deliver_all(cluster)
        while cluster.network.writes:
            cluster.network.land(0)
    assert lost is not None
    assert cluster.attempts["a", 1].is_open
    cluster.settle()
    # Of a commit that is lost the prefill node knows no more than that it is over.
    assert cluster.attempts["a", 1].is_complete is (kind is not Commit)
    assert bool(cluster.attempts["a", 1].error) is (kind is Commit)
    assert_right(cluster)
    assert_clean(cluster)


@pytest.mark.parametrize("num_lost", [1, 2])
@pytest.mark.parametrize("kind", [Start, Grant, Digests, Resend, Commit, Verified])
def test_with_digests_a_request_survives_the_loss_of_any_message(
    kind: type[Message], num_lost: int
) -> None:
    cluster = make_cluster(20, kv_digests=True)
    place(cluster, "a", 17)
    messages, writes = cluster.network.messages, cluster.network.writes
    lost, is_damaged = 0, False
    for _ in range(200):
        go_on(cluster)
        for message in list(messages):
            if lost < num_lost and isinstance(peek(message.payload), kind):
                messages.remove(message)
                lost += 1
        deliver_all(cluster)
        while writes:
            if is_damaged:
                cluster.network.land(0)
            else:
                cluster.network.land_damaged(0, place=0, byte=0, bit=0)
                is_damaged = True
        cluster.clock.advance(BEAT_INTERVAL_S / 5)
    assert lost == num_lost
    assert is_damaged
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert_right(cluster)
    assert_clean(cluster)


def test_deadlines_of_the_prefill_node_are_by_the_clock_that_it_was_given() -> None:
    cluster = make_cluster(20)
    place(cluster, "a", 10)
    prefill_without_grant(cluster)
    (push,) = cluster.p.requests()
    assert push.transfer_state in ("STARTED", "PUSHING")
    cluster.clock.advance(TIMEOUT_S - 1.0)
    cluster.step("p")
    ages = {view.request_id: view.age_s for view in cluster.p.requests()}
    assert ages == {"a": TIMEOUT_S - 1.0}
    holdings = cluster.p.ledger().holdings
    assert [h.age_s for h in holdings if h.owner is BlockOwner.PUSH] == [TIMEOUT_S - 1.0]
    cluster.clock.advance(2.0)
    cluster.step("p")
    assert cluster.p.requests() == []
    cluster.settle()
    assert_clean(cluster)


class MissingMask:
    """A grammar whose mask another thread computes, and has not computed yet."""

    has_mask = False
    problem = ""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("is_alone", [False, True], ids=["prefill", "decode"])
def test_a_node_that_only_waits_for_a_mask_does_not_go_idle(
    *, is_alone: bool, asynchronous: bool
) -> None:
    """Nobody wakes an idle node for a mask: each late mask cost a quarter of a second."""
    cluster = make_cluster(20, async_scheduling=asynchronous)
    cluster.place("a", 1, prompt_of(1, 4), GREEDY, alone=is_alone)
    node = cluster.d if is_alone else cluster.p
    node._inbox.deliver_commands(node, node._outbox)  # type: ignore[arg-type]  # either role
    request = node.engine.requests["a"]
    request.grammar = MissingMask()  # type: ignore[assignment]  # alike
    for _ in range(3):
        assert node.step()
        assert request.num_computed_tokens == 0
    request.grammar = None  # as if the mask had come, and allowed all tokens
    cluster.settle()
    assert cluster.attempts["a", 1].is_complete
    assert not node.step()
    assert_right(cluster)
    assert_clean(cluster)
