"""`baton admin stats`: counts and latencies of a router, since its start and in the last minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.admin.connection import (
    BaseModelOption,
    OutputFormat,
    OutputOption,
    ask,
)
from baton.cli.admin.output import (
    escape,
    format_count,
    format_seconds,
    is_json,
    make_console,
    make_grid,
    make_table,
    print_json,
)
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from rich.table import Table

    from baton.v1 import admin_pb2

_RANKS = ("p50", "p90", "p99", "max")


def stats(
    window_s: Annotated[
        float, typer.Option(help="Seconds to look back for latencies.", min=1)
    ] = 60.0,
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show how many requests came, how they ended, and how long they took."""
    found = ask(access, "GetStats", window_s=window_s, model=base_model)
    if is_json(output):
        print_json(found)
        return
    console = make_console()
    console.print(_counts(found))
    console.print(
        f"\n[dim]{found.num_finished_in_window} requests finished in the last "
        f"{format_seconds(found.window_s)}[/]"
    )
    if found.num_finished_in_window:
        console.print(latencies_table(found), "")
    if found.nodes:
        console.print(_nodes_table(found))


def latencies_table(found: admin_pb2.GetStatsResponse) -> Table:
    """Return a table with a row per latency."""
    table = make_table("latency", *_RANKS, right=_RANKS)
    rows = (
        ("time to first token", found.ttft_s),
        ("time per token", found.time_per_token_s),
        ("whole request", found.total_s),
    )
    for name, values in rows:
        has_any = values.max > 0
        ranks = (format_seconds(getattr(values, rank)) if has_any else "" for rank in _RANKS)
        table.add_row(name, *ranks)
    return table


def _counts(found: admin_pb2.GetStatsResponse) -> Table:
    table = make_grid()
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("uptime", format_seconds(found.uptime_s))
    table.add_row("policy", found.policy)
    table.add_row("open", f"{found.num_open}, {found.num_queued} of them not on nodes yet")
    table.add_row("finished", f"{found.num_finished}, {found.num_retried} of them tried again")
    table.add_row("failed", _by_reason(found.num_failed) or "0")
    table.add_row(
        "tokens",
        f"{format_count(found.num_prompt_tokens)} in, {format_count(found.num_output_tokens)} out",
    )
    if found.HasField("admission"):
        admission = found.admission
        table.add_row(
            "admission",
            f"{admission.num_queued} wait ({format_count(admission.num_queued_tokens)} tokens), "
            f"{format_seconds(admission.expected_wait_s)} expected",
        )
        table.add_row("refused", _by_reason(admission.num_refused) or "0")
    if found.overload.reason:
        table.add_row("overload", f"{found.overload.level}: {found.overload.reason}")
    return table


def _nodes_table(found: admin_pb2.GetStatsResponse) -> Table:
    numbers = ("requests", "in/s", "out/s", "TTFT p50", "p99", "per token p50", "p99 ", "failed")
    table = make_table("node", *numbers, right=numbers)
    for node in found.nodes:
        table.add_row(
            escape(node.node_name),
            str(node.num_requests),
            _rate(node.num_prompt_tokens, found.window_s),
            _rate(node.num_output_tokens, found.window_s),
            *_pair(node.ttft_s),
            *_pair(node.time_per_token_s),
            str(node.num_failed_attempts or ""),
        )
    return table


def _rate(number: int, seconds: float) -> str:
    return format_count(number / seconds) if number else ""


def _pair(values: admin_pb2.Percentiles) -> tuple[str, str]:
    return (format_seconds(values.p50), format_seconds(values.p99)) if values.max else ("", "")


def _by_reason(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(numbers.items()))
