"""Unit tests of PrefixSources: only connected nodes, and only if fetching beats computing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.kv.prefixes import fetch_end, share_end
from baton.link.words import NodeRegistration, NodeRole, PeerReport, PeerUpdate, StepTime
from router.fleet.node_pool import NodePool
from router.fleet.prefix_sources import BARRED_S, LONGEST_S, MAX_HOLDERS, STALE_S, PrefixSource
from tests.fakes.router.nodes import (
    DECODE_RECEIPT,
    PREFILL_RECEIPT,
    HandNode,
    make_pool,
    make_registration,
)
from tests.fakes.time.virtual_clock import VirtualClock

BYTES_PER_TOKEN = 50_000.0


class Fleet:
    """Two prefill nodes and two decode nodes, whose ends for prefixes are connected."""

    def __init__(self, bandwidth: float = 1e9) -> None:
        self.clock = VirtualClock()
        self.pool: NodePool = make_pool(clock=self.clock)
        self.p = self._join("p0", NodeRole.PREFILL)
        self.other_p = self._join("p1", NodeRole.PREFILL)
        self.d = [self._join(f"d{i}", NodeRole.DECODE) for i in range(2)]
        self.holders = {"d0": self.d[0], "d1": self.d[1], "p1": self.other_p}
        self.bandwidth = bandwidth
        for one in self.holders.values():
            self.report(one, True)

    def _join(self, name: str, role: NodeRole) -> HandNode:
        times = (StepTime(64, 0.064), StepTime(512, 0.512)) if role is NodeRole.PREFILL else ()
        registered: NodeRegistration = dataclasses.replace(
            make_registration(name, role),
            fetch_peer_info=f"to {name}".encode() if role is NodeRole.PREFILL else b"",
            share_peer_info=f"from {name}".encode(),
            kv_bytes_per_token=BYTES_PER_TOKEN,
            step_times=times,
        )
        return HandNode(self.pool, registered)

    def report(self, holder: HandNode, connected: bool) -> None:
        end = fetch_end(self.p.node.engine_id)
        problem = "" if connected else "silent"
        report = PeerReport(end, connected, "nixl", problem, self.bandwidth if connected else 0.0)
        self.pool.on_event(holder.node, report)
        back = PeerReport(share_end(holder.node.engine_id), connected, "nixl", problem)
        self.pool.on_event(self.p.node, back)

    def choose(self, num_tokens: int = 1000, **cached: int) -> PrefixSource | None:
        nodes = {"p": self.p, **self.holders}
        sources = self.pool.prefix_sources.compare(
            self.p.node,
            [one.node for one in self.holders.values()],
            {nodes[name].node.engine_id: num for name, num in cached.items()},
            num_tokens,
        )
        assert not any(one.terms.is_chosen for one in sources[1:])
        return sources[0] if sources and sources[0].terms.is_chosen else None


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_nodes_are_told_of_each_others_ends_for_prefixes(fleet: Fleet) -> None:
    told = {one.engine_id: one for one in fleet.p.of(PeerUpdate)}
    other, decode = told[fleet.other_p.node.engine_id], told[fleet.d[0].node.engine_id]
    assert (other.peer_info, other.fetch_peer_info, other.share_peer_info) == (
        *(b"", b"to p1", b"from p1"),
    )
    assert decode.peer_info
    assert (decode.fetch_peer_info, decode.share_peer_info) == (b"", b"from d0")
    for one in fleet.d[0].of(PeerUpdate):
        assert one.fetch_peer_info in (b"to p0", b"to p1")
        assert not one.share_peer_info, "decode nodes fetch nothing"
    assert not fleet.pool.fleet, "an end for prefixes is no pair"
    for role in (NodeRole.DECODE, NodeRole.PREFILL):
        plain = HandNode(fleet.pool, make_registration(f"plain {role}", role))
        ends = {(one.fetch_peer_info, one.share_peer_info) for one in plain.of(PeerUpdate)}
        assert ends == {(b"", b"")}
        assert all(one.peer_info for one in plain.of(PeerUpdate)), "no prefill node of another"


def test_prefill_nodes_send_to_each_other(fleet: Fleet) -> None:
    source = fleet.choose(p=160, p1=480, d0=320)
    assert source is not None
    assert (source.node.name, source.num_tokens) == ("p1", 480)
    assert source.terms.node == "p1"
    assert source.terms.num_lacking == 320
    assert source.terms.compute_s == pytest.approx(0.32)
    fleet.pool.remove(fleet.other_p.node)
    assert fleet.choose(p=160, p1=480) is None
    removed = [one for one in fleet.p.of(PeerUpdate) if one.removed]
    assert [one.engine_id for one in removed] == [fleet.other_p.node.engine_id]


def test_each_direction_between_prefill_nodes_has_its_own_reports(fleet: Fleet) -> None:
    p0, p1 = fleet.p.node, fleet.other_p.node
    back = PeerReport(share_end(p0.engine_id), False, "nixl", "silent")
    fleet.pool.on_event(p1, back)  # p1 cannot receive from p0
    assert fleet.choose(p1=480) is not None, "but p0 can receive from p1"
    fleet.pool.on_event(p0, PeerReport(share_end(p1.engine_id), False, "nixl"))
    assert fleet.choose(p1=480) is None, "p0 would not wait for it"
    assert not fleet.pool.fleet
    assert p1.engine_id not in p0.reports


def test_a_prefill_node_is_never_paired_with_another(fleet: Fleet) -> None:
    report = PeerReport(fleet.other_p.node.engine_id, True, "nixl")
    fleet.pool.on_event(fleet.p.node, report)
    assert not fleet.p.node.reports
    assert fleet.pool.num_pairs_connected == 0


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


def test_of_a_long_prefix_only_what_comes_in_time_is_fetched() -> None:
    fleet = Fleet(bandwidth=1e8)  # half a millisecond per token
    source = fleet.choose(num_tokens=9000, p=160, d0=8160)
    assert source is not None
    num_lacking = source.terms.num_lacking
    assert num_lacking % 16 == 0
    assert 0.9 * LONGEST_S < source.terms.fetch_s <= LONGEST_S
    assert source.num_tokens == 160 + num_lacking
    assert source.terms.compute_s == pytest.approx(0.001 * num_lacking)


def test_a_fetch_costs_nothing_while_the_reader_computes_other_prompts() -> None:
    fleet = Fleet(bandwidth=2e7)  # a fetch takes 2.5 times as long as computing
    assert fleet.choose(d0=160) is None
    fleet.p.node.load.note_opened(1000, num_uncomputed=1000)
    source = fleet.choose(d0=160)
    assert source is not None
    assert source.terms.fetch_s == 0.0


def test_reports_on_ends_for_prefixes_make_no_new_fleet(fleet: Fleet) -> None:
    made, changed = fleet.pool.fleet, fleet.pool._changed
    fleet.bandwidth = 2e9
    for is_connected in (True, False, True):
        fleet.report(fleet.d[0], is_connected)
    assert fleet.pool.fleet is made
    assert not changed.is_set(), "no waiting call is woken"


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


def test_nothing_is_kept_of_nodes_that_left(fleet: Fleet) -> None:
    source = fleet.choose(d0=480)
    assert source is not None
    lost = dataclasses.replace(PREFILL_RECEIPT, num_fetches_lost=1)
    source.note_receipt(lost)
    fleet.pool.remove(fleet.d[0].node)
    source.note_receipt(lost)  # of another prompt whose prefix the node was to send
    assert not fleet.pool.prefix_sources._barred


def test_measured_fetches_decide(fleet: Fleet) -> None:
    source = fleet.choose(d0=480)
    assert source is not None
    for _ in range(8):  # a fetch takes longer than to compute
        slow = dataclasses.replace(PREFILL_RECEIPT, num_fetched_tokens=480, fetch_wait_s=2.0)
        source.note_receipt(slow)
    assert fleet.choose(d0=480) is None
    assert fleet.choose(d1=480) is not None, "another pair of nodes"
    fleet.clock.advance(STALE_S + 1)
    assert fleet.choose(d0=480) is not None, "the path is tried again"


def test_fetches_beside_the_reader_s_queue_are_not_measured(fleet: Fleet) -> None:
    account = fleet.p.node.load.note_opened(1000, num_uncomputed=1000)
    source = fleet.choose(d0=480)
    assert source is not None
    for _ in range(8):  # the reader computes other prompts meanwhile
        late = dataclasses.replace(PREFILL_RECEIPT, num_fetched_tokens=480, fetch_wait_s=1.0)
        source.note_receipt(late)
    fleet.p.node.load.note_closed(account)
    assert fleet.choose(d0=480) is not None


def test_a_decode_node_that_computes_a_prompt_gets_prefixes(fleet: Fleet) -> None:
    reader = fleet.p = HandNode(  # the reader in `report` and `choose`
        fleet.pool,
        dataclasses.replace(
            make_registration("d2", NodeRole.DECODE),
            fetch_peer_info=b"to d2",
            kv_bytes_per_token=BYTES_PER_TOKEN,
            step_times=(StepTime(64, 0.064), StepTime(512, 0.512)),
        ),
    )
    assert {one.share_peer_info for one in reader.of(PeerUpdate)} == {
        *(b"from p0", b"from p1", b"from d0", b"from d1"),
    }
    assert fleet.choose(d0=480) is None, "not connected yet"
    for holder in (fleet.d[0], fleet.other_p):
        fleet.report(holder, True)
    source = fleet.choose(d0=320, p1=480)
    assert source is not None
    assert (source.node.name, source.reader_engine_id) == ("p1", reader.node.engine_id)
    lost = dataclasses.replace(DECODE_RECEIPT, num_fetches_lost=1)
    source.note_receipt(lost)
    assert fleet.choose(p1=480) is None
    counts = fleet.pool.prefix_sources.add_fetchable(
        {fleet.d[0].node.engine_id: 480}, {reader.node.engine_id: reader.node}
    )
    assert 0.8 * 480 < counts[reader.node.engine_id] < 480


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


def test_tokens_at_the_end_of_a_long_prefix_save_more_time(fleet: Fleet) -> None:
    """With a share of 0.005, the 320 tokens behind 160 attend to 320 others on average."""
    load = fleet.p.node.load
    load.attention_share = share = 0.005
    source = fleet.choose(d0=480, p=160)
    assert source is not None
    token_s = load.prefill.per_unit
    assert source.terms.compute_s == pytest.approx(token_s * 320 * (1 + share * 320))
    p, d0 = (one.node.engine_id for one in (fleet.p, fleet.d[0]))
    counts = fleet.pool.prefix_sources.add_fetchable({d0: 480, p: 160}, {p: fleet.p.node})
    assert 160 < counts[p] < 480
    # What counts as lacking takes as long as the fetch, to within a token.
    num_lacking = 480 - counts[p]
    lacking_s = token_s * num_lacking * (1 + share * (counts[p] + num_lacking / 2))
    assert lacking_s == pytest.approx(source.terms.fetch_s, abs=token_s * (1 + share * 480))


def test_of_many_holders_only_those_with_most_are_considered(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, p = fleet.pool.prefix_sources, fleet.p.node
    asked, terms = list[str](), sources._terms
    cached = {}
    for number in range(3 * MAX_HOLDERS):
        name = f"more-{number}"
        holder = fleet.holders[name] = fleet._join(name, NodeRole.DECODE)
        fleet.report(holder, True)
        cached[holder.node.engine_id] = 160 + 16 * number

    def note_and_ask(holder_id: str, *rest: Any) -> Any:
        asked.append(holder_id)
        return terms(holder_id, *rest)

    monkeypatch.setattr(sources, "_terms", note_and_ask)
    counts = sources.add_fetchable(cached, {p.engine_id: p})
    assert asked == list(cached)[: -MAX_HOLDERS - 1 : -1]
    assert 0.8 * max(cached.values()) < counts[p.engine_id] < max(cached.values())
