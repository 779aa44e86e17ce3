"""Unit tests of the ledger: balance, orphans, and the text for operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.link import wire_ledger
from baton.telemetry.ledger import BlockHolding, BlockOwner, Ledger, balance, to_ranges
from baton.v1 import admin_pb2, admin_pb2_grpc
from router.api.admin.views import audits_of


def hold(owner: BlockOwner, *block_ids: int) -> BlockHolding:
    return BlockHolding(
        owner=owner, block_ids=block_ids, request_id="r1", epoch=7, state="PUSHING", peer="d0-1"
    )


def take(*holdings: BlockHolding, ref_counts: dict[int, int]) -> Ledger:
    return balance(holdings, ref_counts, num_blocks=10, num_free_blocks=10 - len(ref_counts))


def test_a_ledger_balances_when_every_reference_has_one_owner() -> None:
    ledger = take(
        hold(BlockOwner.REQUEST, 1, 2, 3),
        hold(BlockOwner.PUSH, 2, 3),
        ref_counts={1: 1, 2: 2, 3: 2},
    )
    assert (ledger.orphans, ledger.overdrawn, ledger.num_references) == ((), (), 5)


def test_a_reference_too_many_is_an_orphan_and_one_too_few_is_overdrawn() -> None:
    ledger = take(hold(BlockOwner.REQUEST, 1, 2, 3), ref_counts={1: 1, 2: 2, 5: 1})
    assert ledger.orphans == (2, 5)
    assert ledger.overdrawn == (3,)


@pytest.mark.parametrize(
    ("block_ids", "ranges"),
    [([], []), ([4], [(4, 1)]), ([4, 5, 6, 9, 3, 4], [(4, 3), (9, 1), (3, 2)])],
)
def test_ids_that_follow_one_another_are_ranges(
    block_ids: list[int], ranges: list[tuple[int, int]]
) -> None:
    assert to_ranges(block_ids) == ranges


class Admin(admin_pb2_grpc.AdminServicer):
    """A router that answers for one node, and says what is wrong with the others."""

    def __init__(self) -> None:
        self.address = ""
        self.ledger = Ledger(
            holdings=(), num_blocks=1, num_free_blocks=1, num_references=0, orphans=(), overdrawn=()
        )
        self.problems: list[str] = []

    def Audit(
        self, request: admin_pb2.AuditRequest, context: grpc.ServicerContext
    ) -> admin_pb2.AuditResponse:
        [ledger] = wire_ledger.ledger_to_protos(self.ledger, 2**16)
        nodes = [admin_pb2.NodeAudit(node_name="n0", ledger=ledger)]
        nodes += [admin_pb2.NodeAudit(node_name="n1", problem=text) for text in self.problems]
        return admin_pb2.AuditResponse(nodes=nodes)


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(made, server)  # type: ignore[no-untyped-call]  # generated
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None)


def audit(admin: Admin) -> tuple[int, str]:
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(app, ["admin", "audit", "--router", admin.address])
    return result.exit_code, result.output


def test_audit_of_nodes_in_order_names_every_owner_and_ends_with_0(admin: Admin) -> None:
    admin.ledger = take(
        hold(BlockOwner.PUSH, 4, 5, 6, 9), ref_counts=dict.fromkeys((4, 5, 6, 9), 1)
    )
    code, output = audit(admin)
    assert code == 0, output
    row = next(line for line in output.splitlines() if "PUSHING" in line)
    assert row.split()[:9] == ["n0", "push", "r1", "7", "PUSHING", "d0-1", "0", "us", "4:"]
    assert "n0: 4 of 10 blocks held, 4 references, 4 of them with an owner" in output


def test_audit_names_orphans_and_ends_with_5(admin: Admin) -> None:
    admin.ledger = take(ref_counts={2: 1, 3: 1, 7: 1})
    code, output = audit(admin)
    assert code == 5
    assert "ORPHANS (references without an owner): blocks 2-3, 7" in output
    admin.ledger = take(hold(BlockOwner.REQUEST, 2), ref_counts={})
    code, output = audit(admin)
    assert code == 5
    assert "OVERDRAWN (owners without a reference): blocks 2" in output


@pytest.mark.medium
def test_audit_ends_with_1_when_a_node_or_the_router_cannot_be_asked(admin: Admin) -> None:
    admin.problems = ["n1: the router cannot reach it at h:1 (UNAVAILABLE)"]
    code, output = audit(admin)
    assert code == 1
    assert "n0: 0 of 1 blocks held" in output
    assert "n1: the router cannot reach it at h:1 (UNAVAILABLE)" in output
    admin.address = "127.0.0.1:1"
    code, output = audit(admin)
    assert (code, "cannot be reached (is it up?)" in output) == (1, True)


def test_the_memory_for_encodings_is_audited_beside_the_kv_blocks() -> None:
    encodings = take(hold(BlockOwner.GRANT, 1, 2), ref_counts={1: 1, 2: 1, 5: 1})
    ledger = dataclasses.replace(
        take(hold(BlockOwner.REQUEST, 1), ref_counts={1: 1}), encodings=encodings
    )
    assert (ledger.num_orphans, ledger.num_overdrawn) == (1, 0)
    merged = admin_pb2.NodeAdminResponse()
    for part in wire_ledger.ledger_to_answers(ledger, 1):
        merged.MergeFrom(part)
    own, landing = audits_of("p0", merged)
    assert (own.node_name, landing.node_name) == ("p0", "p0 (encodings)")
    assert [one.owner for one in own.ledger.holdings] == ["request"]
    assert [one.owner for one in landing.ledger.holdings] == ["grant"]
    assert [(one.first_block_id, one.num_blocks) for one in landing.ledger.orphans] == [(5, 1)]
    (alone,) = wire_ledger.ledger_to_answers(dataclasses.replace(ledger, encodings=None), 2**16)
    assert [one.node_name for one in audits_of("p0", alone)] == ["p0"]
