"""`baton admin cache`: show how full prefix caches are, and how many tokens they served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.cli.admin.connection import OutputFormat, OutputOption, ask
from baton.cli.admin.nodes import role_of
from baton.cli.admin.output import (
    escape,
    format_count,
    format_seconds,
    is_json,
    make_console,
    make_table,
    print_first_that_fits,
    print_json,
)
from baton.cli.router_access import OperatorAccess
from baton.telemetry.receipt_table import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from baton.v1 import admin_pb2

_SOURCES = ("from memory", "from files", "fetched")


def cache(access: OperatorAccess, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show how full the nodes' prefix caches and files are, and how many tokens each served."""
    response = ask(access, "ListNodes")
    if is_json(output):
        print_json(response)
        return
    found = [one for one in response.nodes if not one.lost and one.num_blocks]
    console = make_console()
    if not found:
        console.print("no node with a prefix cache has joined")
        return
    print_first_that_fits(console, _table(found, wide=True), _table(found, wide=False))
    console.print(
        "[dim]tokens of prompts since each node's start; unused: mean time since the last use of "
        "evicted blocks[/]"
    )


def _table(found: Sequence[admin_pb2.NodeDescription], *, wide: bool) -> Table:
    """Return a table with a row per node; narrow consoles get fewer columns."""
    holds = ("cached", "pinned", "unused", "files") if wide else ("cached", "files")
    table = make_table("node", "role", *holds, *_SOURCES, right=(*holds, *_SOURCES))
    for one in found:
        use = one.beat.cache
        cells = {
            "cached": format_bytes(use.num_bytes),
            "pinned": f"{use.num_pinned_blocks / one.num_blocks:.0%}",
            "unused": format_seconds(use.evicted_after_s) if use.evicted_after_s else "",
            "files": format_bytes(use.file_bytes) if use.num_files else "",
        }
        tokens = (use.memory_tokens, use.file_tokens, use.fetched_tokens)
        table.add_row(
            escape(one.node_name),
            role_of(one),
            *(cells[name] for name in holds),
            *(format_count(number) if number else "" for number in tokens),
        )
    return table
