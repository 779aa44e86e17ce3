"""Audit: asks a router for KV blocks that have no owner, or are held for ended requests.

While requests run, most blocks are held for good reasons. One look finds blocks whose request the
router no longer has; only a later look shows whether the nodes never free these blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import grpc

from baton.access.tls import NO_TLS, TlsOptions, read_tls
from baton.link.words import scoped_id, split_request_id
from baton.serving.rpc import bearer, open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 15.0
_POLL_S = 0.1
# These owners keep blocks without a request; their blocks are no leak. The owner "cache" is an
# encode node's cache.
_NO_REQUEST = frozenset({"null block", "cache"})
_MOST_REQUESTS = 2**31 - 1  # maximum length of a list; more than can be open

# (node name, id of the request that holds the block; empty: none does, block id)
Block = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAudit:
    """Totals of the block ledgers of the nodes that answered.

    Attributes:
        num_orphans: number of blocks with more references than owners, or more owners than
            references.
        num_held: number of blocks that are held, with or without an owner.
        problems: nodes that could not be asked, with the reasons.
    """

    num_orphans: int
    num_held: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The held blocks of all nodes at one moment.

    Attributes:
        held: blocks with an owner, and blocks whose references have no owner.
        stale: those of the held blocks that have no owner, or whose request is no longer open.
    """

    audit: BlockAudit
    held: frozenset[Block] = frozenset()
    stale: frozenset[Block] = frozenset()


class Auditor:
    """Asks a router for the ledgers of its nodes.

    Args:
        router: the router's address, ``host:port``.
        token: an operator's token for the router; empty: none is needed.
        tls: certificates for the connection to the router.
    """

    def __init__(self, router: str, token: str, tls: TlsOptions = NO_TLS) -> None:
        self._router = router
        self._tls = tls
        self._metadata = bearer(token)

    async def look(self) -> Look:
        """Ask the router which blocks its nodes hold.

        Never raises: a router that does not answer becomes one of the audit's problems.
        """
        async with open_channel(self._router, read_tls(self._tls)) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            call = {"timeout": _TIMEOUT_S, "metadata": self._metadata}
            try:
                found: admin_pb2.AuditResponse = await stub.Audit(admin_pb2.AuditRequest(), **call)
                # List the open requests after the audit, so that the list contains requests that
                # began in between: their blocks are no leak.
                listed: admin_pb2.ListRouterRequestsResponse = await stub.ListRequests(
                    admin_pb2.ListRouterRequestsRequest(limit=_MOST_REQUESTS, open_only=True),
                    **call,
                )
            except grpc.RpcError as error:
                problem = f"{self._router} does not answer: {error.details() or error.code().name}"
                return Look(audit=BlockAudit(num_orphans=0, num_held=0, problems=(problem,)))
        nodes = [one for one in found.nodes if not one.problem]
        problems = tuple(f"{one.node_name}: {one.problem}" for one in found.nodes if one.problem)
        open_ids = {scoped_id(one.request_id, one.tenant) for one in listed.requests}
        return _look(nodes, open_ids, problems)

    async def look_until_free(self, timeout_s: float) -> Look:
        """Look again and again after the last request, until no block is held or time is up."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            found = await self.look()
            if not found.audit.num_held or time.monotonic() > give_up_at:
                return found
            await asyncio.sleep(_POLL_S)


def _look(
    nodes: Sequence[admin_pb2.NodeAudit], open_ids: Set[str], problems: tuple[str, ...]
) -> Look:
    """Collect the nodes' held blocks; ``open_ids``: the ids of the router's open requests."""
    unowned = [
        (one.node_name, part)
        for one in nodes
        for part in (*one.ledger.orphans, *one.ledger.overdrawn)
    ]
    owned = [
        (one.node_name, holding)
        for one in nodes
        for holding in one.ledger.holdings
        if holding.owner not in _NO_REQUEST
    ]
    orphans = {block for node, part in unowned for block in _blocks(node, "", [part])}
    held = {
        block
        for node, holding in owned
        for block in _blocks(node, holding.request_id, holding.ranges)
    }
    # A node's request ids also contain the router's id.
    ended = {block for block in held if split_request_id(block[1])[0] not in open_ids}
    return Look(
        audit=BlockAudit(
            num_orphans=sum(part.num_blocks for _, part in unowned),
            num_held=sum(holding.num_blocks for _, holding in owned),
            problems=problems,
        ),
        held=frozenset(held | orphans),
        stale=frozenset(ended | orphans),
    )


def _blocks(node: str, request_id: str, ranges: Iterable[admin_pb2.BlockRange]) -> Iterator[Block]:
    for part in ranges:
        for block_id in range(part.first_block_id, part.first_block_id + part.num_blocks):
            yield node, request_id, block_id
