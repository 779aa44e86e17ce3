"""Where cached prefixes come from: a connected node, and only if this is faster than computing."""

from __future__ import annotations

import dataclasses

import pytest

from baton.kv.prefixes import fetch_end
from baton.link.words import NodeRegistration, NodeRole, PeerReport, PeerUpdate, StepTime
from router.fleet.node_pool import NodePool
from router.fleet.prefix_sources import BARRED_S, PrefixSource
from tests.fakes.router.nodes import PREFILL_RECEIPT, HandNode, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock

BYTES_PER_TOKEN = 50_000.0


class Fleet:
    """A prefill node and two decode nodes, whose ends for prefixes are connected."""

    def __init__(self, bandwidth: float = 1e9) -> None:
        self.clock = VirtualClock()
        self.pool: NodePool = make_pool(clock=self.clock)
        self.p = self._join("p0", NodeRole.PREFILL)
        self.d = [self._join(f"d{i}", NodeRole.DECODE) for i in range(2)]
        self.bandwidth = bandwidth
        for one in self.d:
            self.report(one, True)

    def _join(self, name: str, role: NodeRole) -> HandNode:
        times = (StepTime(64, 0.064), StepTime(512, 0.512)) if role is NodeRole.PREFILL else ()
        registered: NodeRegistration = dataclasses.replace(
            make_registration(name, role),
            fetch_peer_info=f"prefixes of {name}".encode(),
            kv_bytes_per_token=BYTES_PER_TOKEN,
            step_times=times,
        )
        return HandNode(self.pool, registered)

    def report(self, holder: HandNode, connected: bool) -> None:
        end = fetch_end(self.p.node.engine_id)
        problem = "" if connected else "silent"
        report = PeerReport(end, connected, "nixl", problem, self.bandwidth if connected else 0.0)
        self.pool.on_event(holder.node, report)

    def choose(self, num_tokens: int = 1000, **cached: int) -> PrefixSource | None:
        nodes = {"p": self.p, "d0": self.d[0], "d1": self.d[1]}
        return self.pool.prefix_sources.choose(
            self.p.node,
            [one.node for one in self.d],
            {nodes[name].node.engine_id: num for name, num in cached.items()},
            num_tokens,
        )


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_nodes_are_told_of_each_others_ends_for_prefixes(fleet: Fleet) -> None:
    assert [one.fetch_peer_info for one in fleet.p.of(PeerUpdate)] == [
        b"prefixes of d0",
        b"prefixes of d1",
    ]
    assert {one.fetch_peer_info for one in fleet.d[0].of(PeerUpdate)} == {b"prefixes of p0"}
    assert not fleet.pool.fleet, "an end for prefixes is no pair"
    plain = HandNode(fleet.pool, make_registration("d9", NodeRole.DECODE))
    assert {one.fetch_peer_info for one in plain.of(PeerUpdate)} == {b""}


def test_the_node_that_has_most_sends(fleet: Fleet) -> None:
    source = fleet.choose(p=160, d0=480, d1=320)
    assert source is not None
    assert (source.node.name, source.num_tokens) == ("d0", 480)
    source = fleet.choose(num_tokens=480, p=160, d0=480)
    assert source is not None
    assert source.num_tokens == 464, "the prefill node computes the last token"


def test_little_or_nothing_is_not_fetched(fleet: Fleet) -> None:
    assert fleet.choose(p=160) is None
    assert fleet.choose(p=160, d0=160) is None
    assert fleet.choose(p=160, d0=176) is None, "one block is not worth the messages"


def test_a_slow_path_is_not_used() -> None:
    assert Fleet(bandwidth=1e6).choose(p=0, d0=480) is None
    assert Fleet(bandwidth=1e8).choose(p=0, d0=480) is not None


def test_only_connected_nodes_send(fleet: Fleet) -> None:
    fleet.report(fleet.d[0], False)
    assert fleet.choose(d0=480) is None
    fleet.report(fleet.d[0], True)
    assert fleet.choose(d0=480) is not None
    fleet.pool.remove(fleet.d[0].node)
    assert fleet.choose(d0=480) is None


def test_a_node_whose_prefix_was_lost_sends_nothing_for_a_while(fleet: Fleet) -> None:
    source = fleet.choose(d0=480)
    assert source is not None
    source.note_receipt(dataclasses.replace(PREFILL_RECEIPT, num_fetches_lost=1))
    assert fleet.choose(d0=480) is None
    assert fleet.choose(d1=480) is not None
    fleet.clock.advance(BARRED_S + 1)
    assert fleet.choose(d0=480) is not None


def test_measured_fetches_decide(fleet: Fleet) -> None:
    source = fleet.choose(d0=480)
    assert source is not None
    for _ in range(8):  # a fetch takes longer than to compute
        slow = dataclasses.replace(PREFILL_RECEIPT, num_fetched_tokens=480, fetch_wait_s=2.0)
        source.note_receipt(slow)
    assert fleet.choose(d0=480) is None
    assert fleet.choose(d1=480) is not None, "another pair of nodes"


def test_policies_count_what_can_be_fetched(fleet: Fleet) -> None:
    p, d0, d1 = (one.node.engine_id for one in (fleet.p, *fleet.d))
    nodes = {one.node.engine_id: one.node for one in (fleet.p, *fleet.d)}
    sources = fleet.pool.prefix_sources
    counts = sources.add_fetchable({d0: 480, p: 160}, nodes)
    assert counts[d0] == 480
    assert 160 + 0.8 * 320 < counts[p] < 480, "a fetch takes time, too"
    assert d1 not in counts
    assert sources.add_fetchable({d0: 160, p: 160}, nodes) == {d0: 160, p: 160}
    slow = Fleet(bandwidth=1e6)
    first = slow.d[0].node.engine_id
    assert slow.pool.prefix_sources.add_fetchable({first: 480}, {}) == {first: 480}
