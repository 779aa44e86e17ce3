"""Unit tests of Introductions: which node is told about which peers, in how many messages."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import uvloop

from baton.link.words import NodeRole, PeerReport, PeerReports, PeerUpdate, PeerUpdates
from router.fleet.node_claims import Vocabulary, event_problem
from router.fleet.node_pool import NodePool
from router.fleet.peers import introductions
from router.fleet.peers.introductions import EARLY_S, MAX_AWAITED, MAX_NEWS_BYTES
from tests.fakes.router.nodes import HandNode, make_pool, make_registration
from tests.fakes.router.router_scene import asynchronous
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let news about connected peers be sent at once."""
    monkeypatch.setattr(introductions, "KNOWN_S", 0.0)


class BatchNode(HandNode):
    """A node that reads `PeerUpdates`, and has not sent its first reports yet."""

    def __init__(self, pool: NodePool, name: str, role: NodeRole, peer_info: bytes = b"") -> None:
        said = make_registration(name, role)
        info = peer_info or said.peer_info
        super().__init__(pool, dataclasses.replace(said, batches_peers=True, peer_info=info))

    def report(self, *connected: str, unknown: tuple[str, ...] = ()) -> None:
        reports = tuple(PeerReport(engine_id, True, "t", "", 5.0) for engine_id in connected)
        self.pool.on_event(self.node, PeerReports(reports, unknown))

    def news(self) -> list[PeerUpdates]:
        """Return the messages about peers since the last call."""
        found = self.of(PeerUpdates)
        self.commands.clear()
        return found


def join(pool: NodePool, *names: str) -> list[BatchNode]:
    """Join nodes that are connected to no peer; a node's name tells its role."""
    nodes = [BatchNode(pool, name, P if name[0] == "p" else D) for name in names]
    for node in nodes:
        node.report()
    return nodes


async def until_told(*nodes: BatchNode) -> None:
    """Wait until each of these nodes has a message about peers."""
    while not all(node.of(PeerUpdates) for node in nodes):  # noqa: ASYNC110  # nodes are fakes
        await asyncio.sleep(0.001)


@asynchronous
async def test_a_storm_of_joins_is_one_message_to_each_node() -> None:
    pool = make_pool()
    p0, p1, d0, d1, d2 = join(pool, "p0", "p1", "d0", "d1", "d2")
    await until_told(p0, p1, d0, d1, d2)
    for prefill in (p0, p1):
        (news,) = prefill.news()
        assert [update.engine_id for update in news.updates] == ["d0-0", "d1-0", "d2-0"]
        assert news.updates[0] == PeerUpdate("d0-0", b"info of d0-0")
        assert not news.known
    for decode in (d0, d1, d2):
        (news,) = decode.news()
        assert [update.engine_id for update in news.updates] == ["p0-0", "p1-0"]


def test_news_are_sent_on_the_event_loop_of_routers() -> None:
    """Regression: uvloop's handles of calls that are due at once know no time."""

    async def run() -> None:
        pool = make_pool()
        p0, d0, d1 = join(pool, "p0", "d0", "d1")
        await until_told(p0, d0, d1)

    uvloop.run(run())


@asynchronous
async def test_a_node_is_introduced_only_after_its_first_reports() -> None:
    pool = make_pool()
    (d0,) = join(pool, "d0")
    p0 = BatchNode(pool, "p0", P)
    old = HandNode(pool, make_registration("d1", D))
    await asyncio.sleep(0.01)
    assert not d0.news() + p0.news()
    assert not old.of(PeerUpdate)
    p0.report()
    assert old.of(PeerUpdate) == [PeerUpdate("p0-0", b"info of p0-0")]  # at once: an old node
    await until_told(d0, p0)
    (news,) = p0.news()
    assert [update.engine_id for update in news.updates] == ["d0-0", "d1-0"]


@asynchronous
async def test_after_a_restart_of_the_router_connected_pairs_are_listed_and_not_met_again() -> None:
    pool = make_pool()
    p0, d0 = BatchNode(pool, "p0", P), BatchNode(pool, "d0", D)
    p0.report("d0-0", "gone-0")
    d0.report("p0-0")
    assert pool.num_pairs_connected == 1
    assert pool.fleet.prefills
    d1 = BatchNode(pool, "d1", D)  # a peer to which neither was connected
    d1.report()
    await until_told(p0, d0, d1)
    assert p0.news() == [PeerUpdates((PeerUpdate("d1-0", b"info of d1-0"),), ("d0-0",))]
    assert d0.news() == [PeerUpdates((), ("p0-0",))]


@asynchronous
async def test_reports_on_peers_that_join_later_count_when_they_join() -> None:
    pool = make_pool()
    p0 = BatchNode(pool, "p0", P)
    p0.report("d0-0")
    assert pool.num_pairs_connected == 0
    d0 = BatchNode(pool, "d0", D)
    d0.report("p0-0")
    assert pool.num_pairs_connected == 1
    await until_told(p0, d0)
    assert p0.news() == [PeerUpdates((), ("d0-0",))]
    assert d0.news() == [PeerUpdates((), ("p0-0",))]


@asynchronous
async def test_a_peer_that_has_forgotten_a_node_is_met_by_both() -> None:
    """If only the peer were told, only its silence would show the node the lost connection."""
    pool = make_pool()
    p0 = BatchNode(pool, "p0", P)
    p0.report("d0-0")
    (d0,) = join(pool, "d0")
    assert pool.num_pairs_connected == 0
    await until_told(p0, d0)
    for node, other in ((p0, "d0-0"), (d0, "p0-0")):
        (news,) = node.news()
        assert [update.engine_id for update in news.updates] == [other]
        assert not news.known


@asynchronous
async def test_a_listed_peer_that_a_node_has_lost_meanwhile_is_told_in_full() -> None:
    pool = make_pool()
    p0, d0 = BatchNode(pool, "p0", P), BatchNode(pool, "d0", D)
    p0.report("d0-0")
    d0.report("p0-0")
    await until_told(p0, d0)
    assert p0.news() == [PeerUpdates((), ("d0-0",))]
    p0.report(unknown=("d0-0", "nobody", "p0-0"))
    assert pool.num_pairs_connected == 0
    await until_told(p0)
    assert p0.news() == [PeerUpdates((PeerUpdate("d0-0", b"info of d0-0"),))]


@asynchronous
async def test_a_peer_that_leaves_is_removed_and_its_return_told_after_its_removal() -> None:
    pool = make_pool()
    p0, d0 = join(pool, "p0", "d0")
    await until_told(p0)
    p0.news()
    p0.report("d0-0")
    d0.leave()
    assert pool.num_pairs_connected == 0
    join(pool, "d0")
    await until_told(p0)
    removed, joined = PeerUpdate("d0-0", removed=True), PeerUpdate("d0-0", b"info of d0-0")
    assert p0.news() == [PeerUpdates((removed, joined))]


@asynchronous
async def test_a_peer_that_leaves_before_it_was_told_of_is_only_removed() -> None:
    pool = make_pool()
    p0, d0 = join(pool, "p0", "d0")
    d0.leave()
    await until_told(p0)
    assert p0.news() == [PeerUpdates((PeerUpdate("d0-0", removed=True),))]


@asynchronous
async def test_another_bandwidth_makes_no_new_fleet() -> None:
    """Regression: after each report, the next request made a fleet anew."""
    pool = make_pool()
    p0, d0 = join(pool, "p0", "d0")

    def report(rate: float, problem: str = "") -> None:
        pool.on_event(
            p0.node, PeerReports((PeerReport(d0.engine_id, not problem, "t", problem, rate),))
        )

    report(100.0)
    fleet = pool.fleet
    [prefill], [decode] = fleet.prefills, fleet.decodes
    report(50.0)
    assert pool.fleet is fleet
    assert fleet.bandwidth(prefill, decode) == 50.0
    report(101.0)  # the highest bandwidth is a part of the fleet
    assert pool.fleet is not fleet
    assert pool.fleet.best_bandwidth == 101.0
    report(0.0, "silent")
    assert not pool.fleet


def test_news_about_connected_peers_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a restarted router told each node again and again, while others joined."""
    monkeypatch.setattr(introductions, "KNOWN_S", 1000.0)

    @asynchronous
    async def run() -> None:
        pool = make_pool()
        p0, d0 = BatchNode(pool, "p0", P), BatchNode(pool, "d0", D)
        p0.report("d0-0")
        d0.report("p0-0")
        join(pool, "d1")
        await until_told(p0)
        assert p0.news() == [PeerUpdates((PeerUpdate("d1-0", b"info of d1-0"),), ("d0-0",))]
        assert not d0.news()
        join(pool, "p1")
        await until_told(d0)
        assert d0.news() == [PeerUpdates((PeerUpdate("p1-0", b"info of p1-0"),), ("p0-0",))]

    run()


@asynchronous
async def test_large_peer_infos_are_divided_over_messages() -> None:
    pool = make_pool()
    (p0,) = join(pool, "p0")
    info = b"i" * (MAX_NEWS_BYTES // 3)
    for number in range(7):
        BatchNode(pool, f"d{number}", D, info).report()
    await until_told(p0)
    sizes = [len(news.updates) for news in p0.news()]
    assert sizes == [3, 3, 1]


@asynchronous
async def test_early_reports_of_a_node_that_left_do_not_count() -> None:
    pool = make_pool()
    p0, p1 = BatchNode(pool, "p0", P), BatchNode(pool, "p1", P)
    for prefill in (p0, p1):
        prefill.report("d0-0")
    p0.leave()
    (p0,) = join(pool, "p0")  # the same process joins again, and has lost its peers
    d0 = BatchNode(pool, "d0", D)
    d0.report("p0-0", "p1-0")
    assert pool.num_pairs_connected == 1
    await until_told(p0, p1, d0)
    assert p0.news() == [PeerUpdates((PeerUpdate("d0-0", b"info of d0-0"),))]
    assert p1.news() == [PeerUpdates((), ("d0-0",))]
    assert d0.news() == [PeerUpdates((PeerUpdate("p0-0", b"info of p0-0"),), ("p1-0",))]


@asynchronous
async def test_reports_of_nodes_that_come_and_go_do_not_pile_up() -> None:
    pool = make_pool()
    for number in range(50):  # there is always a node with early reports
        prefill = BatchNode(pool, f"p{number}", P)
        prefill.report(*(f"d{number}-{index}" for index in range(1000)))
        for node in [one for one in pool.nodes if one is not prefill.node]:
            pool.remove(node)
    assert pool._introductions.num_awaited < MAX_AWAITED + 1000
    early = pool._introductions._early
    assert [len(kept) for _, kept in early._by.values()] == [1000]


@asynchronous
async def test_peers_that_do_not_join_in_time_are_awaited_no_longer() -> None:
    """Regression: they counted until another node joined, so that nodes beat too rarely."""
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    BatchNode(pool, "p0", P).report("d0-0", "d1-0")
    join(pool, "d0")
    assert pool._introductions.num_awaited == 1
    clock.advance(EARLY_S)
    assert pool._introductions.num_awaited == 0


@asynchronous
async def test_a_node_with_another_configuration_has_a_problem_with_each_peer() -> None:
    pool = make_pool()
    p0, p1, d0 = join(pool, "p0", "p1", "d0")
    said = dataclasses.replace(
        make_registration("d1", D, differs={"dtype": "bfloat16"}), batches_peers=True
    )
    d1 = HandNode(pool, said)
    pool.on_event(d1.node, PeerReports())
    await until_told(p0, p1, d0)
    assert {"dtype" in p.node.reports["d1-0"].problem for p in (p0, p1)} == {True}
    assert [len(news.updates) for news in p0.news()] == [1]  # d0
    assert not d1.of(PeerUpdates)
    d1.leave()
    assert not p0.node.reports


@pytest.mark.parametrize(
    "wrong",
    [
        PeerReport("d0", True, "t", "", float("nan")),
        PeerReport("d0", True, "t", "", -1.0),
        PeerReport("d0", True, "t", "", 2e15),
        PeerReport("d\x1b[2J", True, "t"),
        PeerReport("d" * 257, True, "t"),
        PeerReport("d0", True, "t\n"),
        PeerReport("d0", False, "t", "x" * 2**17),
    ],
)
def test_one_impossible_report_among_many_is_named(wrong: PeerReport) -> None:
    said, good = make_registration("p0", P), PeerReport("d1", True, "t", "", 5.0)
    vocabulary = Vocabulary(10, 10)
    assert not event_problem(said, PeerReports((good,) * 3), vocabulary)
    for reports in ((wrong, good), (good, wrong)):
        assert event_problem(said, PeerReports(reports), vocabulary)
