"""`baton admin version`: versions of this program, the router and its nodes."""

from __future__ import annotations

import typer

from baton.cli.admin.connection import (
    OutputFormat,
    OutputOption,
    ask,
)
from baton.cli.admin.output import is_json, make_console, print_json
from baton.cli.router_access import OperatorAccess
from baton.version import __version__


def version(
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the versions of this program, the router and its nodes, and whether they differ."""
    found = ask(access, "GetVersion")
    if is_json(output):
        print_json(
            {
                "client": __version__,
                "router": found.router,
                "nodes": dict(sorted(found.nodes.items())),
            }
        )
        return
    versions = {"client": __version__, "router": found.router, **dict(sorted(found.nodes.items()))}
    for name, of in versions.items():
        typer.echo(f"{name:<{max(map(len, versions))}}  {of}")
    if len(set(versions.values())) > 1:
        make_console().print("the versions differ", style="yellow")
