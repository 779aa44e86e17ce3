"""Unit tests of Reach and PrefixSources: what a node that leaves costs, among many pairs."""

from __future__ import annotations

import dataclasses

from baton.kv.prefixes import fetch_end
from baton.link.words import NodeRole, PeerReport
from router.fleet.node import Node
from router.fleet.peers.pairing import Reach
from router.fleet.prefix_sources import PrefixSources
from tests.fakes.router.nodes import make_registration
from tests.fakes.time.virtual_clock import VirtualClock

NUM = 30


class CountedId(str):
    """An engine id that counts how often any of its kind is hashed or compared."""

    __slots__ = ()
    num_looks = 0

    def __hash__(self) -> int:
        CountedId.num_looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedId.num_looks += 1
        return super().__eq__(other)


def make_nodes(role: NodeRole) -> list[Node]:
    registrations = [make_registration(f"{role.value}{i}", role) for i in range(NUM)]
    return [
        Node(dataclasses.replace(one, engine_id=CountedId(one.engine_id)), lambda command: None)
        for one in registrations
    ]


def test_a_node_that_leaves_takes_its_own_pairs_along_and_looks_at_no_others() -> None:
    """Regression: each of 500 nodes that left at once looked at 250,000 pairs that were down."""
    reach = Reach()
    prefills, decodes = make_nodes(NodeRole.PREFILL), make_nodes(NodeRole.DECODE)
    for prefill in prefills:
        for decode in decodes:
            prefill.reports[decode.engine_id] = PeerReport(decode.engine_id, False)
            reach.note_report(prefill, decode)
    assert reach.num_down == NUM * NUM
    CountedId.num_looks = 0
    reach.forget(decodes[0].engine_id)
    assert CountedId.num_looks < 10 * NUM
    assert reach.num_down == NUM * (NUM - 1)
    decodes[1].reports[prefills[0].engine_id] = PeerReport(prefills[0].engine_id, True)
    prefills[0].reports[decodes[1].engine_id] = PeerReport(decodes[1].engine_id, True)
    reach.note_report(decodes[1], prefills[0])
    assert reach.num_down == NUM * (NUM - 1) - 1
    for prefill in prefills:
        reach.forget(prefill.engine_id)
    assert reach.num_down == 0


def test_a_node_that_leaves_takes_its_own_reports_on_prefixes_along() -> None:
    sources = PrefixSources(VirtualClock())
    prefills, decodes = make_nodes(NodeRole.PREFILL), make_nodes(NodeRole.DECODE)
    for prefill in prefills:
        report = PeerReport(fetch_end(prefill.engine_id), True)
        for decode in decodes:
            sources.note_report(decode, prefill, report)
    CountedId.num_looks = 0
    sources.forget(decodes[0].engine_id)
    assert CountedId.num_looks < 30 * NUM
    assert len(sources._reports) == NUM * (NUM - 1)
    for prefill in prefills:
        sources.forget(prefill.engine_id)
    assert not sources._reports


def test_the_slowest_pairs_are_listed_first_and_unknown_ones_last() -> None:
    reach = Reach()

    def report(sender: str, receiver: str, rate: float) -> None:
        reach.note(sender, receiver, PeerReport(receiver, True, "", "", rate), None)

    for receiver, rate in (("d0", 5.0), ("d1", 0.0), ("d2", 7.0)):
        report("p0", receiver, rate)
    for receiver, rate in (("d0", 7.0), ("d1", 7.0), ("d2", 1.0)):
        report("p1", receiver, rate)
    known = [(1.0, "p1", "d2"), (5.0, "p0", "d0")]
    assert reach.list_slowest(("p0", "p1"), 1) == known[:1]
    assert reach.list_slowest(("p0", "p1"), 2) == known
    third = reach.list_slowest(("p0", "p1"), 3)
    assert third[:2] == known
    assert [rate for rate, *_ in third] == [1.0, 5.0, 7.0]
    every = reach.list_slowest(("p0", "p1", "nobody"), 9)
    assert [rate for rate, *_ in every] == [1.0, 5.0, 7.0, 7.0, 7.0, 0.0]
    assert len(set(every)) == 6
    assert Reach().list_slowest(("p0",), 3) == []
