"""Tests that encode nodes are in no pair, so their number and losses affect no request."""

from __future__ import annotations

import dataclasses

from baton.link.words import NodeBeat, NodeRole
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock


def join_encode_nodes(pool: NodePool, number: int) -> list[HandNode]:
    return [HandNode(pool, make_registration(f"e{i}", NodeRole.ENCODE)) for i in range(number)]


def test_only_nodes_of_pairs_are_counted_when_losses_are_judged() -> None:
    pool = make_pool()
    join_pair(pool)
    join_encode_nodes(pool, 8)
    assert pool.num_pair_nodes == 2


def test_no_request_is_suspected_of_ending_an_encode_node() -> None:
    clock = VirtualClock(100_000.0)
    pool = make_pool(clock=clock)
    prefill, _ = join_pair(pool)
    (encode,) = join_encode_nodes(pool, 1)
    encode.leave()
    assert not pool.lost_nodes.lost_since(0.0)
    assert [one.node_name for one in pool.lost] == ["e0"], "operators see it"
    prefill.leave()
    assert len(pool.lost_nodes.lost_since(0.0)) == 1


def test_a_stuck_encode_node_gets_no_images_even_if_it_is_the_only_one() -> None:
    pool = make_pool()
    join_pair(pool)
    (encode,) = join_encode_nodes(pool, 1)
    pool.on_event(encode.node, NodeBeat(stalled_s=1000.0, stalled_thread="engine"))
    assert not pool.is_eligible(encode.node)
    assert not pool.lost_nodes.lost_since(0.0)
    pool.on_event(encode.node, NodeBeat())
    assert pool.is_eligible(encode.node)


def test_a_lost_encode_node_is_missed_only_by_nodes_that_receive_encodings() -> None:
    pool = make_pool()
    registered = make_registration("p0", NodeRole.PREFILL)
    HandNode(pool, registered)
    for number in (1, 2):
        HandNode(
            pool,
            dataclasses.replace(
                make_registration(f"p{number}", NodeRole.PREFILL), encodings_peer_info=b"info"
            ),
        )
    (encode,) = join_encode_nodes(pool, 1)
    encode.leave()
    assert pool.num_pairs_down == 2
