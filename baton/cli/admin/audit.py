"""`baton admin audit`: shows the owners of KV blocks on each node, and blocks without owner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from baton.cli.admin.connection import (
    ExitCode,
    OptionalNodeArgument,
    OutputFormat,
    OutputOption,
    ask,
)
from baton.cli.admin.output import (
    escape,
    format_seconds,
    make_console,
    make_table,
    print_first_that_fits,
    show,
)
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from baton.v1 import admin_pb2

MAX_RANGES = 4  # maximum number of block ranges that the table shows per owner; JSON has all
_NO_TRANSFER = ("request", "null block", "step in flight")


def audit(
    node: OptionalNodeArgument = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the owners of KV blocks on a node, or on all; exit code 5 if a block has no owner.

    On a healthy node, the listed owners hold all references that the node's block pool counts.
    """
    found: admin_pb2.AuditResponse = ask(access, "Audit", node=node)
    show(found, output, _print)
    if any(_problem(one.ledger) for one in found.nodes):
        raise typer.Exit(ExitCode.ORPHANS)
    if any(one.problem for one in found.nodes):
        raise typer.Exit(ExitCode.ERROR)


def _print(found: admin_pb2.AuditResponse) -> None:
    """Print a table with a row per owner, and with fewer columns if the console is narrow."""
    wide, narrow = (
        make_table(*columns, right=("epoch", "age"), whole=("request",))
        for columns in (
            ("node", "owner", "request", "epoch", "state", "peer", "age", "blocks"),
            ("node", "owner", "request", "age", "blocks"),
        )
    )
    verdicts = []
    for one in found.nodes:
        name = escape(one.node_name)
        if one.problem:
            verdicts.append(f"[red]{escape(one.problem)}[/]")
            continue
        for holding in one.ledger.holdings:
            owner, request_id, epoch, state, peer, age, blocks = _cells(holding)
            wide.add_row(name, owner, request_id, epoch, state, peer, age, blocks)
            narrow.add_row(name, owner, request_id, age, blocks)
        problem = _problem(one.ledger)
        style = "red" if problem else "green"
        verdicts.append(f"[{style}]{name}: {_balance(one.ledger)}{problem}[/]")
    console = make_console()
    if wide.row_count:
        print_first_that_fits(console, wide, narrow)
    for verdict in verdicts or ["no node has joined"]:
        console.print(verdict, soft_wrap=True)


def _cells(holding: admin_pb2.BlockHolding) -> tuple[str, ...]:
    has_transfer = holding.owner not in _NO_TRANSFER
    return (
        holding.owner,
        escape(holding.request_id),
        str(holding.epoch) if has_transfer else "",
        holding.state,
        escape(holding.peer),
        format_seconds(holding.age_s) if holding.request_id else "",
        f"{holding.num_blocks}: {_ids(holding.ranges[:MAX_RANGES])}"
        + (", ..." if len(holding.ranges) > MAX_RANGES else ""),
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
    """Return block ids as text such as ``3-7, 9``."""
    ends = ((r.first_block_id, r.first_block_id + r.num_blocks - 1) for r in ranges)
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
