"""The commands of `baton admin`, in the order that its help shows."""

from __future__ import annotations

from baton.cli.admin import (
    audit,
    explain,
    lifecycle,
    nodes,
    quarantine,
    requests,
    stats,
    top,
    tuning,
    version,
)
from baton.cli.command_line import CommandLine

app = CommandLine(
    no_args_is_help=True,
    help="Operate a router and its nodes. Exit codes: 0 done, 1 error or unreachable, 2 usage, "
    "3 no such node or request, 4 the time is up, 5 the audit found orphans.",
)
app.command()(nodes.nodes)
app.command()(nodes.node)
app.command()(lifecycle.drain)
app.command()(lifecycle.resume)
app.command()(lifecycle.remove)
app.command()(top.top)
app.command()(stats.stats)
app.command()(requests.requests)
app.command()(requests.trace)
app.command()(explain.explain)
app.command()(requests.abort)
app.command()(quarantine.quarantine)
app.command()(quarantine.release)
app.command()(audit.audit)
app.add_typer(tuning.policy, name="policy")
app.command()(tuning.flush_cache)
app.command()(tuning.log_level)
app.command()(tuning.profile)
app.command()(version.version)
