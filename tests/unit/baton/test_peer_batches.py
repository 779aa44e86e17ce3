"""Unit tests of messages about many peers over real links, also with older nodes and routers."""

from __future__ import annotations

import dataclasses

import pytest

from baton.api.errors import InvalidRequestError
from baton.link import router_link, wire
from baton.link.message_cuts import MAX_PARTS, parts_problem
from baton.link.node_end import MAX_PEER_REPORTS, NodeEnd, merge_reports
from baton.link.words import NodeBeat, NodeRole, PeerReport, PeerReports, PeerUpdate
from baton.v1 import node_pb2
from router.fleet.node_claims import MAX_PEER_REPORTS as MOST_READ
from router.fleet.node_claims import Vocabulary, event_problem
from router.fleet.peers import introductions
from tests.fakes.router.nodes import HandNode, make_registration
from tests.unit.baton.test_router_links import Router, Scene, asynchronous, served, until


def met(scene: Scene) -> list[str]:
    """Return the engine ids of the peers that a node was told to connect to, in order."""
    updates = [command for command in scene.commands if isinstance(command, PeerUpdate)]
    return [update.engine_id for update in updates if not update.removed]


def decode_at(router: Router, name: str = "d0") -> HandNode:
    return HandNode(router.pool, make_registration(name, NodeRole.DECODE))


def connected_decode_at(router: Router) -> None:
    """Join d0; its first message reports that it is connected to the node of `Scene`."""
    said = make_registration("d0", NodeRole.DECODE)
    d0 = HandNode(router.pool, dataclasses.replace(said, batches_peers=True))
    router.pool.on_event(d0.node, PeerReports((PeerReport("p0-0", True, "t"),)))


@asynchronous
async def test_a_router_that_a_node_joins_later_knows_its_peers_at_once() -> None:
    one, other = Router(), Router()
    scene = Scene(one.address, other.address)
    async with served(one), scene.running():
        decode_at(one)
        await until(lambda: met(scene) == ["d0-0"])
        scene.links.emit(PeerReport("d0-0", True, "t", "", 5.0))
        await until(lambda: one.pool.num_pairs_connected == 1)
        connected_decode_at(other)
        decode_at(other, "d1")
        async with served(other):
            await until(lambda: other.pool.num_pairs_connected == 1)
            await until(lambda: met(scene) == ["d0-0", "d1-0"])  # d0 is not told again
            # The peer is alive as long as one of the two routers lists it
            one.pool.remove(one.pool.nodes[0])
            await until(lambda: len(scene.links._peers._listed_by["d0-0"]) == 1)
            assert "d0-0" in scene.links.reached


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers send news about connected peers at once."""
    monkeypatch.setattr(introductions, "KNOWN_S", 0.0)


@pytest.mark.usefixtures("_no_waits")
@asynchronous
async def test_a_node_that_lost_a_peer_that_a_router_lists_is_told_of_it_again() -> None:
    router = Router()
    scene = Scene(router.address)
    scene.links.emit(PeerReport("d0-0", True, "t"))
    async with served(router), scene.running():
        await until(lambda: router.pool.nodes)
        scene.links._peers.connected.clear()
        connected_decode_at(router)
        await until(lambda: met(scene) == ["d0-0"])
        assert router.pool.num_pairs_connected == 0


@asynchronous
async def test_many_reports_are_one_message_and_arrive_in_order() -> None:
    router = Router()
    scene = Scene(router.address)
    async with served(router), scene.running():
        for number in range(3):
            decode_at(router, f"d{number}")
        await until(lambda: len(met(scene)) == 3)
        for number in range(3):
            scene.links.emit(PeerReport(f"d{number}-0", True, "t"))
        scene.links.emit(PeerReport("d1-0", False, problem="silent"))
        await until(lambda: router.node.reports.get("d1-0", PeerReport("", True)).problem)
        assert router.pool.num_pairs_connected == 2
        assert router.pool.num_pairs_down == 1


def test_reports_are_merged_between_other_events_and_up_to_a_limit() -> None:
    one, long = PeerReport("d", True), PeerReport("d", False, problem="x" * 2**18)
    beat = NodeBeat()
    assert merge_reports([one, one, beat, one]) == [
        PeerReports((one, one)),
        beat,
        PeerReports((one,)),
    ]
    many = merge_reports([one] * (MAX_PEER_REPORTS + 1))
    assert [len(batch.reports) for batch in many] == [MAX_PEER_REPORTS, 1]  # type: ignore[union-attr]  # no other event is there
    assert len(merge_reports([long] * 3)) == 2


def test_a_report_that_no_message_can_hold_does_not_stop_the_others() -> None:
    reports = PeerReports((PeerReport("d0", True, "t"), PeerReport("d1", False, problem="a\udcff")))
    found = wire.node_event_from_proto(wire.node_event_to_proto(reports))
    assert isinstance(found, PeerReports)
    assert [one.engine_id for one in found.reports] == ["d0", "d1"]
    assert found.reports[1].problem == "a\\udcff"


@pytest.mark.parametrize(
    ("num_groups", "num_ids"), [(MAX_PARTS + 1, 0), (2, MAX_PARTS // 2)], ids=["groups", "reports"]
)
def test_no_message_has_more_reports_than_can_be_read(num_groups: int, num_ids: int) -> None:
    """Each takes two bytes on the wire, and a hundred as an object."""
    group = node_pb2.PeerReportGroup(engine_ids=[""] * num_ids)
    reports = node_pb2.PeerReports(groups=[group] * num_groups)
    problem = parts_problem(node_pb2.NodeMessage(peer_reports=reports))
    assert problem.startswith(f"message: must have at most {MAX_PARTS} parts")


def test_an_older_router_gets_one_message_for_each_report() -> None:
    end = NodeEnd(make_registration("p0", NodeRole.PREFILL))
    assert end.register().register.batches_peers
    answer = node_pb2.Registered(router_id="r")
    end.take_first(node_pb2.RouterMessage(registered=answer))
    assert end.joined
    assert not end.batches_peers


def test_columns_of_unequal_length_and_too_many_reports_are_refused() -> None:
    group = node_pb2.PeerReportGroup(engine_ids=["a", "b"], bandwidths_bytes_per_s=[1.0])
    reports = node_pb2.NodeMessage(peer_reports=node_pb2.PeerReports(groups=[group]))
    with pytest.raises(InvalidRequestError, match="peer_reports: must have columns of one length"):
        wire.node_event_from_proto(reports)
    updates = node_pb2.PeerUpdates(engine_ids=["a", "b"], peer_infos=[b"1"])
    with pytest.raises(InvalidRequestError, match="peer_updates: must have columns of one length"):
        wire.command_from_proto(node_pb2.RouterMessage(peer_updates=updates))
    node = dataclasses.replace(make_registration("p0", NodeRole.PREFILL), batches_peers=True)
    problem = event_problem(node, PeerReports(unknown=("d",) * (MOST_READ + 1)), Vocabulary(9, 9))
    assert problem == f"peer_reports: must be at most {MOST_READ}, got {MOST_READ + 1}"
    bad = PeerReports((PeerReport("d", True, bandwidth_bytes_per_s=-1.0),))
    assert "bandwidth_bytes_per_s" in event_problem(node, bad, Vocabulary(9, 9))


@asynchronous
async def test_a_node_that_lost_its_link_does_not_ask_a_restarted_router_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a thousand nodes opened more connections while the router was starting."""
    asked: list[str] = []

    def note(address: str, *_: object) -> str:
        asked.append(address)
        return ""

    monkeypatch.setattr(router_link, "why_refused", note)
    monkeypatch.setattr(router_link, "RETRY_INTERVAL_S", 0.01)
    router = Router()
    scene = Scene(router.address)
    async with scene.running():
        async with served(router):
            await until(lambda: scene.joins == [True])
        asked.clear()
        await router.server.stop(None)
        attempts = scene.links._links[router.address]
        await until(lambda: attempts._told)
        again = Router(listen=router.address)
        async with served(again):
            await until(lambda: scene.joins == [True, False, True])
        await again.server.stop(None)
    assert not asked
