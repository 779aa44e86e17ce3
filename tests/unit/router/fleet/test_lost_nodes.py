"""Test which losses are deaths: links come back, and processes go on."""

from __future__ import annotations

import pytest

from baton.link.words import NodeBeat, NodeRole
from router.fleet.lost_nodes import RETURN_S, Fate, LostNodes
from tests.fakes.router.nodes import HandNode, join_pair, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE


def test_the_same_process_that_joins_again_did_not_die() -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    decode.leave()
    [loss] = pool.lost_nodes.lost_since(0)
    assert pool.lost_nodes.fate(loss) is Fate.OPEN
    assert pool.lost_nodes.last_loss_at == loss.at
    HandNode(pool, decode.node.registration)
    assert pool.lost_nodes.fate(loss) is Fate.RETURNED
    assert pool.lost_nodes.lost_since(0) == []
    assert pool.lost_nodes.last_loss_at == float("-inf")


def test_another_process_under_the_same_name_shows_that_the_first_died() -> None:
    pool = make_pool()
    _, decode = join_pair(pool)
    decode.leave()
    [loss] = pool.lost_nodes.lost_since(0)
    HandNode(pool, make_registration("d1", D))
    assert pool.lost_nodes.fate(loss) is Fate.OPEN
    HandNode(pool, make_registration("d0", D, incarnation=1))
    assert pool.lost_nodes.fate(loss) is Fate.DEAD


def test_what_does_not_come_back_in_time_is_dead_unless_it_comes_back_later() -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    _, decode = join_pair(pool)
    decode.leave()
    [loss] = pool.lost_nodes.lost_since(0)
    clock.advance(RETURN_S - 0.1)
    assert pool.lost_nodes.fate(loss) is Fate.OPEN
    clock.advance(0.2)
    assert pool.lost_nodes.fate(loss) is Fate.DEAD
    HandNode(pool, decode.node.registration)
    assert pool.lost_nodes.fate(loss) is Fate.RETURNED


def test_a_link_that_the_node_saw_break_first_is_no_death() -> None:
    """The node joins again while its old link still seems to be up."""
    pool = make_pool()
    _, decode = join_pair(pool)
    HandNode(pool, decode.node.registration)
    assert pool.lost_nodes.lost_since(0) == []


def test_a_node_that_stood_still_and_then_ends_is_lost_once() -> None:
    pool = make_pool()
    _, decode = join_pair(pool)
    join_pair(pool, 1)
    stuck = NodeBeat(num_free_blocks=10, stalled_s=10.0, stalled_thread="engine")
    pool.on_event(decode.node, stuck)
    [loss] = pool.lost_nodes.lost_since(0)
    decode.leave()
    assert pool.lost_nodes.lost_since(0) == [loss]


def test_a_node_that_stood_still_and_goes_on_was_not_lost() -> None:
    pool = make_pool()
    _, decode = join_pair(pool)
    join_pair(pool, 1)
    stuck = NodeBeat(num_free_blocks=10, stalled_s=10.0, stalled_thread="engine")
    pool.on_event(decode.node, stuck)
    pool.on_event(decode.node, NodeBeat(num_free_blocks=10))
    assert pool.lost_nodes.lost_since(0) == []


@pytest.mark.parametrize("role", [P, D])
def test_a_pool_awaits_nodes_of_a_role_that_is_missing(role: NodeRole) -> None:
    clock = VirtualClock()
    pool = make_pool(clock=clock)
    prefill, decode = join_pair(pool)
    assert pool.awaited_until(60) < 0  # all nodes are here
    hand = prefill if role is P else decode
    lost_at = clock()
    hand.leave()
    clock.advance(7)
    assert pool.awaited_until(60) == lost_at + 60
    pool.expel(hand.node.name)  # by an operator: no call waits for the node any more
    assert pool.awaited_until(60) < 0


def test_losses_that_are_remembered_are_bounded() -> None:
    lost_nodes = LostNodes(VirtualClock())
    for number in range(5000):
        lost_nodes.note_loss(f"d{number}", "d", 1)
    assert len(lost_nodes.lost_since(0)) == 1024
