"""`baton admin top`: nodes, queue, tokens per second and latencies, live."""

from __future__ import annotations

import itertools
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.admin.connection import AdminConnection, connection
from baton.cli.admin.nodes import nodes_table
from baton.cli.admin.output import format_count, format_seconds, make_console
from baton.cli.admin.stats import latencies_table
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from rich.console import Group

    from baton.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class _Sample:
    """The figures of a router and its nodes at one moment."""

    at: float
    model: str
    nodes: list[admin_pb2.NodeDescription]
    stats: admin_pb2.GetStatsResponse


def top(
    interval_s: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.1)] = 1.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Take two samples, print the result and end; also works without a tty."
        ),
    ] = False,
    *,
    access: OperatorAccess,
) -> None:
    """Watch a router and its nodes; Ctrl-C ends it."""
    # The handler is set even if Ctrl-C is ignored from the start, as it is in background jobs of
    # scripts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = make_console()
    with connection(access) as admin:
        last = _take(admin)
        if once or not console.is_terminal:
            time.sleep(interval_s)
            console.print(_frame(access.router, last, _take(admin)))
            return
        from rich.live import Live

        with Live(
            _frame(access.router, last, last), console=console, screen=True, auto_refresh=False
        ) as live:
            try:
                while True:
                    time.sleep(interval_s)
                    sample = _take(admin)
                    live.update(_frame(access.router, last, sample), refresh=True)
                    last = sample
            except KeyboardInterrupt:
                return


def _take(admin: AdminConnection) -> _Sample:
    listed = admin.call("ListNodes")
    stats = admin.call("GetStats")
    return _Sample(time.monotonic(), listed.model, list(listed.nodes), stats)


def _frame(router: str, last: _Sample, sample: _Sample) -> Group:
    """Return what to display: the last sample, and rates since the sample before."""
    from rich.console import Group
    from rich.text import Text

    stats = sample.stats
    seconds = max(sample.at - last.at, 1e-9)
    tokens_in = (stats.num_prompt_tokens - last.stats.num_prompt_tokens) / seconds
    tokens_out = (stats.num_output_tokens - last.stats.num_output_tokens) / seconds
    finished = (stats.num_finished - last.stats.num_finished) / seconds
    num_failed = sum(stats.num_failed.values())
    num_queued = stats.num_queued
    if stats.HasField("admission"):
        num_queued = max(num_queued, stats.admission.num_queued)
    facts = {
        "open": str(stats.num_open),
        "queued": str(num_queued),
        "finished/s": format_count(finished),
        "tokens/s in": format_count(tokens_in),
        "out": format_count(tokens_out),
        "failed": str(num_failed),
    }
    title = Text.assemble(
        ("baton ", "bold"), router, ("  model ", "dim"), sample.model.rstrip("/").split("/")[-1],
        ("  policy ", "dim"), stats.policy, ("  up ", "dim"), format_seconds(stats.uptime_s),
    )  # fmt: skip
    pairs = ([(f"{name} ", "dim"), (f"{value}   ", "bold")] for name, value in facts.items())
    line = Text.assemble(*itertools.chain.from_iterable(pairs))
    return Group(
        title, line, "", nodes_table(sample.nodes, peers=False), "",
        Text(f"of {stats.num_finished_in_window} requests in the last "
             f"{format_seconds(stats.window_s)}", style="dim"),
        latencies_table(stats),
    )  # fmt: skip
