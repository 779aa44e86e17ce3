"""Tests of both nodes' ledgers while blocks are being sent."""

from __future__ import annotations

from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from tests.property.test_handoff import make_cluster
from tests.unit.test_handoff import deliver_all, go_on, place, run_until_writing


def only(ledger: Ledger, owner: BlockOwner) -> BlockHolding:
    (holding,) = (holding for holding in ledger.holdings if holding.owner is owner)
    return holding


def in_order(node: PrefillNode | DecodeNode) -> Ledger:
    ledger = node.ledger()
    assert (ledger.orphans, ledger.overdrawn) == ((), ())
    assert ledger.num_references == sum(len(holding.block_ids) for holding in ledger.holdings)
    return ledger


def test_each_block_of_a_transfer_has_the_right_owner_on_both_sides() -> None:
    cluster = make_cluster(20)
    assert in_order(cluster.p).holdings == in_order(cluster.d).holdings == ()
    place(cluster, "a", 17, epoch=3)
    run_until_writing(cluster)
    write = cluster.network.writes[0]
    push = only(in_order(cluster.p), BlockOwner.PUSH)
    grant = only(in_order(cluster.d), BlockOwner.GRANT)
    assert set(write.local_block_ids) <= set(push.block_ids)
    assert set(write.remote_block_ids) <= set(grant.block_ids)
    assert (push.request_id, push.epoch, push.state, push.peer) == ("a", 3, "PUSHING", "d")
    assert (grant.request_id, grant.epoch, grant.state, grant.peer) == ("a", 3, "GRANTED", "p")
    cluster.clock.advance(0.5)
    cluster.cancel(("a", 3))
    go_on(cluster)
    drained = only(in_order(cluster.p), BlockOwner.DRAINING)
    held = only(in_order(cluster.d), BlockOwner.QUARANTINE)
    assert set(write.local_block_ids) <= set(drained.block_ids)
    assert set(write.remote_block_ids) <= set(held.block_ids)
    assert (held.state, held.epoch, held.peer) == ("QUARANTINED", 3, "p")
    cluster.settle()
    assert in_order(cluster.p).holdings == in_order(cluster.d).holdings == ()


def test_a_running_request_owns_its_blocks_and_a_null_block_is_owned_once() -> None:
    cluster = make_cluster(20, mixed=True)
    cluster.settle()
    assert {holding.owner for holding in in_order(cluster.d).holdings} == {BlockOwner.NULL_BLOCK}
    place(cluster, "a", 17)
    while not cluster.d_engine.num_commits:
        go_on(cluster)
        deliver_all(cluster)
        while cluster.network.writes:
            cluster.network.land(0)
    running = only(in_order(cluster.d), BlockOwner.REQUEST)
    assert (running.request_id, running.state) == ("a", "RUNNING")
    cluster.settle()


def test_a_reference_that_nobody_owns_is_found() -> None:
    cluster = make_cluster(20)
    leaked = cluster.d.engine.block_pool.allocate(2)
    assert leaked is not None
    assert cluster.d.ledger().orphans == tuple(sorted(leaked))
    place(cluster, "a", 17)
    run_until_writing(cluster)
    grant = only(cluster.d.ledger(), BlockOwner.GRANT)
    cluster.d.engine.block_pool.hold(grant.block_ids[:1])
    assert cluster.d.ledger().orphans == tuple(sorted([*leaked, grant.block_ids[0]]))
    cluster.d.engine.block_pool.release([*leaked, grant.block_ids[0]])
    cluster.settle()
    assert in_order(cluster.d).holdings == ()
