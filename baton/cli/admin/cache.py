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

    from baton.v1 import admin_pb2, node_pb2

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
        "[dim]tokens of prompts since each node's start; after: median time from a block's last "
        "use until a prompt used it again; unused: mean time from a block's last use to its "
        "eviction[/]"
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
            "files": _format_files(use),
        }
        hits = (
            (use.memory_tokens, use.memory_age_s),
            (use.file_tokens, use.file_age_s),
            (use.fetched_tokens, use.fetched_age_s),
        )
        table.add_row(
            escape(one.node_name),
            role_of(one),
            *(cells[name] for name in holds),
            *(_format_hits(num_tokens, age_s) for num_tokens, age_s in hits),
        )
    return table


def _format_files(use: node_pb2.CacheUse) -> str:
    if not use.num_files:
        return ""
    return format_bytes(use.file_bytes) + ("\nin objects" if use.are_objects else "")


def _format_hits(num_tokens: int, age_s: float) -> str:
    """Return a cell with a number of tokens, and below it the age of their blocks."""
    if not num_tokens:
        return ""
    return format_count(num_tokens) + (f"\nafter {format_seconds(age_s)}" if age_s else "")
