"""Audit: KV blocks that nobody owns, or that are held when nobody works; a router is asked."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc

from baton.rpc import bearer, open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 15.0
_POLL_S = 0.1
_NO_REQUEST = "null block"  # is held for ever, by nobody's fault


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAudit:
    """What the nodes say that could be asked.

    Attributes:
        num_orphans: blocks with references without an owner, or owners without a reference.
        num_held: blocks that somebody holds.
        problems: nodes that could not be asked, and why.
    """

    num_orphans: int
    num_held: int
    problems: tuple[str, ...] = ()


class Auditor:
    """Args:
    router: ``host:port``.
    token: of operators; empty: none.
    """

    def __init__(self, router: str, token: str) -> None:
        self._router = router
        self._metadata = bearer(token)

    async def look(self) -> BlockAudit:
        """Never raises for a router that cannot be asked: that is a finding."""
        async with open_channel(self._router) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                found: admin_pb2.AuditResponse = await stub.Audit(
                    admin_pb2.AuditRequest(), timeout=_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.RpcError as error:
                problem = f"{self._router} does not answer: {error.details() or error.code().name}"
                return BlockAudit(num_orphans=0, num_held=0, problems=(problem,))
        ledgers = [one.ledger for one in found.nodes if not one.problem]
        return BlockAudit(
            num_orphans=sum(
                part.num_blocks for one in ledgers for part in (*one.orphans, *one.overdrawn)
            ),
            num_held=sum(
                holding.num_blocks
                for one in ledgers
                for holding in one.holdings
                if holding.owner != _NO_REQUEST
            ),
            problems=tuple(f"{one.node_name}: {one.problem}" for one in found.nodes if one.problem),
        )

    async def look_until_free(self, timeout_s: float) -> BlockAudit:
        """After the last request: until nothing is held, or the time is up."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            found = await self.look()
            if not found.num_held or time.monotonic() > give_up_at:
                return found
            await asyncio.sleep(_POLL_S)
