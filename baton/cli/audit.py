"""`baton audit`: asks all nodes of a router who holds their KV blocks, and looks for leaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import grpc
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.client import DEFAULT_ADDRESS
from baton.rpc import open_sync_channel
from baton.v1 import admin_pb2, admin_pb2_grpc

TIMEOUT_S = 10.0  # a node answers between two steps
_NO_TRANSFER = ("request", "null block", "step in flight")


def audit(
    router: Annotated[str, typer.Option(help="host:port of the router.")] = DEFAULT_ADDRESS,
) -> None:
    """Show who holds the KV blocks of every node; exit code 1 if a block has no owner.

    On a node in order, the references that its block pool counts are those of the owners listed.
    """
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("node", "owner", "request", "epoch", "state", "peer", "blocks", "age"):
        table.add_column(column, overflow="fold")
    verdicts, is_right = [], True
    try:
        nodes = _list_nodes(router)
    except grpc.RpcError as error:
        console.print(f"router: {router} cannot be reached ({error.code().name})", style="red")
        raise typer.Exit(1) from None
    for node in nodes:
        name = escape(node.node_name)
        try:
            ledger = _list_blocks(node.address)
        except grpc.RpcError as error:
            verdicts.append(f"[red]{name}: cannot be asked ({error.code().name})[/]")
            is_right = False
            continue
        for holding in ledger.holdings:
            table.add_row(name, *_cells(holding))
        problem = _problem(ledger)
        is_right &= not problem
        style = "red" if problem else "green"
        verdicts.append(f"[{style}]{name}: {_balance(ledger)}{problem}[/]")
    console.print(table)
    for verdict in verdicts or ["no node has joined"]:
        console.print(verdict, soft_wrap=True)
    if not is_right:
        raise typer.Exit(1)


def _list_nodes(router: str) -> Iterable[admin_pb2.NodeDescription]:
    with open_sync_channel(router) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        response: admin_pb2.ListNodesResponse = stub.ListNodes(
            admin_pb2.ListNodesRequest(), timeout=TIMEOUT_S
        )
    return response.nodes


def _list_blocks(address: str) -> admin_pb2.ListBlocksResponse:
    with open_sync_channel(address) as channel:
        stub = admin_pb2_grpc.NodeAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        response: admin_pb2.ListBlocksResponse = stub.ListBlocks(
            admin_pb2.ListBlocksRequest(), timeout=TIMEOUT_S
        )
    return response


def _cells(holding: admin_pb2.BlockHolding) -> tuple[str, ...]:
    has_transfer = holding.owner not in _NO_TRANSFER
    return (
        holding.owner,
        escape(holding.request_id),
        str(holding.epoch) if has_transfer else "",
        holding.state,
        escape(holding.peer),
        f"{holding.num_blocks}: {_ids(holding.ranges)}",
        f"{holding.age_s:.1f} s" if holding.request_id else "",
    )


def _balance(ledger: admin_pb2.ListBlocksResponse) -> str:
    num_owned = sum(holding.num_blocks for holding in ledger.holdings)
    num_held = ledger.num_blocks - ledger.num_free_blocks
    return (
        f"{num_held} of {ledger.num_blocks} blocks held, {ledger.num_references} references, "
        f"{num_owned} of them with an owner"
    )


def _problem(ledger: admin_pb2.ListBlocksResponse) -> str:
    problem = ""
    if ledger.orphans:
        problem += f"; ORPHANS (references without an owner): blocks {_ids(ledger.orphans)}"
    if ledger.overdrawn:
        problem += f"; OVERDRAWN (owners without a reference): blocks {_ids(ledger.overdrawn)}"
    return problem


def _ids(ranges: Iterable[admin_pb2.BlockRange]) -> str:
    """``3-7, 9``."""
    ends = ((r.first_block_id, r.first_block_id + r.num_blocks - 1) for r in ranges)
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
