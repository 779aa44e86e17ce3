"""Unit tests of the costs of long prompts on nodes whose attention is slow."""

from __future__ import annotations

import dataclasses

import pytest

from baton.link.words import NodeRole
from benchmarks.hosts.link_model import BITS, PAYLOAD_SHARE, Prefills, exposed_s, push_queue
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad, SharedRates
from router.gate.capacity import Capacity
from router.policies.base import RouteQuery
from router.policies.cost import Cost
from router.policies.cost_terms import (
    CostTerms,
    decode_terms,
    local_place,
    pair_place,
    prefill_costs,
    prefill_terms,
)
from router.policies.probes import _looks_slower
from tests.fakes.router.long_prompts import CHUNK, LENGTHS, SHARE, QuadraticNode

KV_BYTES_PER_TOKEN, GBIT_PER_S = 8192.0, 0.1
SLOW_LINK = PAYLOAD_SHARE * GBIT_PER_S * 1e9 / BITS
NODE = QuadraticNode()


def make_fleet(bandwidth: float = SLOW_LINK, num_prefill: int = 1) -> Fleet:
    shared = SharedRates(kv_bytes_per_token=KV_BYTES_PER_TOKEN)

    def load(name: str, role: NodeRole) -> NodeLoad:
        registration = dataclasses.replace(
            NODE.registration(name=name, role=role), num_blocks=20_000
        )
        return NodeLoad(registration, shared, lambda: 0.0)

    prefills = [load(f"p{i}", NodeRole.PREFILL) for i in range(num_prefill)]
    decode = load("d0", NodeRole.DECODE)
    reach = {node.engine_id: {decode.engine_id: bandwidth} for node in prefills}
    return Fleet(prefills, [decode], reach, self_prefilling=[decode])


def terms_of(fleet: Fleet, num_tokens: int, **cached: int) -> CostTerms:
    by_id = {f"{name}-0": number for name, number in cached.items()}
    query = RouteQuery(num_prompt_tokens=num_tokens, max_tokens=8, find_cached_tokens=lambda: by_id)
    return CostTerms.of(query, fleet)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_exposed_transfer_over_a_slow_link_is_expected_within_a_fifth(num_tokens: int) -> None:
    """With a straight line over tokens, 10 s were expected and 0.08 s measured."""
    fleet = make_fleet()
    terms = terms_of(fleet, num_tokens)
    [prefill], [decode] = fleet.prefills, fleet.decodes
    place = pair_place(terms, prefill_terms(terms, prefill), decode_terms(terms, decode))
    prefills = Prefills(
        NODE.base_s + NODE.token_s * CHUNK, NODE.token_s * SHARE * CHUNK * CHUNK / 2
    )
    num_chunks = num_tokens // CHUNK
    assert prefills.ends_at(num_chunks) == pytest.approx(NODE.prompt_s(num_tokens))
    queue = push_queue(prefills, num_chunks, num_tokens * KV_BYTES_PER_TOKEN, "layers")
    expected_s = exposed_s(queue, GBIT_PER_S)
    assert place.terms_s["exposed_transfer_ms"] == pytest.approx(expected_s, rel=0.2)
    assert place.terms_s["prefill_ms"] == pytest.approx(NODE.prompt_s(num_tokens), rel=0.1)


def test_a_short_prompt_behind_a_long_one_is_sent_once_it_is_computed() -> None:
    """The link is idle while the long prompt's last chunks are computed."""
    fleet = make_fleet()
    [prefill], [decode] = fleet.prefills, fleet.decodes

    def exposed() -> float:
        terms = terms_of(fleet, 1024)
        place = pair_place(terms, prefill_terms(terms, prefill), decode_terms(terms, decode))
        return place.terms_s["exposed_transfer_ms"]

    alone_s = exposed()
    prefill.note_opened(16384, num_uncomputed=16384)
    assert exposed() == pytest.approx(alone_s, rel=0.01)


def test_all_costs_of_prefill_nodes_are_those_of_single_nodes() -> None:
    fleet = make_fleet(num_prefill=3)
    fleet.prefills[0].note_opened(9000, num_uncomputed=9000, num_cached=500)
    fleet.prefills[1].weight = 0.5
    for num_tokens in LENGTHS:
        terms = terms_of(fleet, num_tokens, p1=512, p2=20_000)
        assert terms.num_behind > 0
        costs_s = prefill_costs(terms)
        for node, cost_s in zip(fleet.prefills, costs_s, strict=True):
            one = prefill_terms(terms, node)
            assert cost_s == pytest.approx(one.total_s + one.damage_s)


def test_cached_tokens_save_only_the_time_that_they_would_take() -> None:
    fleet = make_fleet()
    [prefill], [decode] = fleet.prefills, fleet.decodes
    num_tokens, num_cached = 16384, 8192
    expected_s = NODE.prompt_s(num_tokens) - NODE.prompt_s(num_cached)
    assert expected_s > 0.7 * NODE.prompt_s(num_tokens)
    terms = terms_of(fleet, num_tokens, p0=num_cached, d0=num_cached)
    assert prefill_terms(terms, prefill).compute_s == pytest.approx(expected_s, rel=0.1)
    alone = local_place(terms, decode_terms(terms, decode, is_alone=True), float("inf"))
    assert alone.terms_s["prefill_ms"] == pytest.approx(expected_s, rel=0.1)


def test_the_delay_of_decodes_is_that_of_the_prompts_units() -> None:
    fleet = make_fleet()
    [decode] = fleet.decodes
    for _ in range(4):
        decode.note_opened(1000, num_arriving=800)
    terms = terms_of(fleet, 16384)
    place = local_place(terms, decode_terms(terms, decode, is_alone=True), float("inf"))
    assert place.terms_s["stall_ms"] == pytest.approx(4 * NODE.prompt_s(16384), rel=0.1)


def test_a_node_with_more_of_the_prompt_is_no_slower_node() -> None:
    fleet = make_fleet(num_prefill=2)
    terms = terms_of(fleet, 16384, p0=8192)
    slow, fast = fleet.prefills[1], fleet.prefills[0]
    assert not _looks_slower(terms, slow, fast)
    assert not _looks_slower(terms, fast, slow)
    slow.attention_share *= 2
    assert _looks_slower(terms, slow, fast)


def test_the_gate_expects_long_prompts_to_wait_longer() -> None:
    fleet = make_fleet()
    capacity = Capacity(lambda: fleet)
    for num_tokens in LENGTHS:
        expected_s = NODE.prompt_s(num_tokens)
        assert capacity.prefill_s(num_tokens) == pytest.approx(expected_s, rel=0.1)
        pairs = 4 * num_tokens**2 / 2
        wait_s = capacity.wait_s(4, 4 * num_tokens, 0, num_prompt_pairs=pairs, last=num_tokens)
        assert wait_s == pytest.approx(5 * expected_s, rel=0.1)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_search_finds_the_cheapest_of_all_places(num_tokens: int) -> None:
    fleet = make_fleet(bandwidth=1e10, num_prefill=3)
    fleet.prefills[0].note_opened(4000, num_uncomputed=4000)
    fleet.prefills[1].note_opened(500, num_uncomputed=500, num_cached=15_000)
    query = RouteQuery(num_prompt_tokens=num_tokens, max_tokens=8)
    best = Cost().explain(query, fleet)[0]
    placement = Cost().pick(query, fleet)
    assert placement is not None
    prefill = placement.prefill.node_name if placement.prefill else ""
    assert (prefill, placement.decode.node_name) == (best.prefill, best.decode)
