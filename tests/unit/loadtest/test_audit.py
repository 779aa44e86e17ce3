"""Unit tests of audits between faults: a router's answer, and which node a leak belongs to."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from baton.link.words import node_request_id, scoped_id
from baton.v1 import admin_pb2, admin_pb2_grpc
from loadtest.drills.audit import Auditor, BlockAudit
from loadtest.drills.faults import Fault
from loadtest.drills.schedule import Schedule
from loadtest.drills.site import Site
from loadtest.load.clock import RunClock

pytestmark = pytest.mark.medium

# As nodes name it: a tenant's request, of one of the routers.
R2 = node_request_id(scoped_id("r2", "t"), "router-0")


class AdminScript(admin_pb2_grpc.AdminServicer):
    """A router whose node holds block 1 for ever for r1; r1 ends before the second audit."""

    def __init__(self) -> None:
        self.num_audits = 0
        self.problem = ""

    def Audit(self, request: Any, context: Any) -> admin_pb2.AuditResponse:
        self.num_audits += 1
        holdings = [
            admin_pb2.BlockHolding(owner="null block", num_blocks=1, ranges=[block_range(0)]),
            admin_pb2.BlockHolding(
                owner="request", request_id="r1~router-0", num_blocks=1, ranges=[block_range(1)]
            ),
        ]
        if self.num_audits < 3:  # r2 is open all the time, and lets go of what it had in the end
            holdings.append(
                admin_pb2.BlockHolding(
                    owner="request", request_id=R2, num_blocks=2, ranges=[block_range(2, 2)]
                )
            )
        orphans = [block_range(9)] if self.num_audits >= 3 else []
        ledger = admin_pb2.ListBlocksResponse(holdings=holdings, orphans=orphans)
        nodes = [admin_pb2.NodeAudit(node_name="d0", ledger=ledger)]
        if self.problem:
            nodes.append(admin_pb2.NodeAudit(node_name="p0", problem=self.problem))
        return admin_pb2.AuditResponse(nodes=nodes)

    def ListRequests(self, request: Any, context: Any) -> admin_pb2.ListRouterRequestsResponse:
        assert request.open_only
        ids = ["r2"] if self.num_audits > 1 else ["r1", "r2"]
        return admin_pb2.ListRouterRequestsResponse(
            requests=[
                admin_pb2.RequestTrace(request_id=one, tenant="t" if one == "r2" else "")
                for one in ids
            ]
        )


def block_range(first: int, num_blocks: int = 1) -> admin_pb2.BlockRange:
    return admin_pb2.BlockRange(first_block_id=first, num_blocks=num_blocks)


def serving(admin: AdminScript) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]  # generated
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    return server, address


def audited(texts: list[str], monkeypatch: pytest.MonkeyPatch, problem: str = "") -> Schedule:
    """A schedule that killed a process twice, between audits of a router whose node leaks."""
    monkeypatch.setattr("loadtest.drills.schedule.FREE_TIMEOUT_S", 0.0)
    admin = AdminScript()
    admin.problem = problem
    server, address = serving(admin)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def scene() -> Schedule:
        schedule = Schedule(
            [Fault.parse(text) for text in texts],
            Site({"p0": process.pid, "d0": process.pid}),
            Auditor(address, ""),
        )
        await schedule.play(RunClock(time.perf_counter))
        await schedule.check_leaks()
        return schedule

    try:
        return asyncio.run(scene())
    finally:
        server.stop(None)
        process.kill()
        process.wait()


def test_a_request_is_open_whatever_nodes_call_it() -> None:
    server, address = serving(AdminScript())
    try:
        before, after = (asyncio.run(Auditor(address, "").look()) for _ in range(2))
    finally:
        server.stop(None)
    assert len(before.held) == len(after.held) == 3
    assert before.stale == set()
    assert after.stale == {("d0", "r1~router-0", 1)}  # r1 has ended, r2 has not


def test_blocks_leak_by_the_fault_after_which_nobody_needed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = audited(["kill p0 @0.1s", "kill d0 @0.7s"], monkeypatch)
    assert schedule.audit == BlockAudit(num_orphans=1, num_held=1)
    # Block 1 was held for a request that had ended before the second fault, block 9 came after it.
    assert [event.num_leaked for event in schedule.events] == [1, 1]
    assert [event.num_orphans for event in schedule.events] == [0, 1]


def test_leaks_of_a_node_that_does_not_answer_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = audited(["kill p0 @0.1s"], monkeypatch, problem="is not there")
    # One audit before and one after: what r1 holds is seen, and p0 may hold more.
    assert [event.num_leaked for event in schedule.events] == [3]
    assert Schedule([], Site({}), None).events == []
