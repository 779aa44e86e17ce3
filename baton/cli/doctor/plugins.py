"""`baton plugins`: lists the plug-ins of installed packages, and imports those that are allowed."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import plugins
from baton.api.errors import ConfigError
from baton.cli.admin.connection import ExitCode
from baton.cli.admin.output import escape, make_console, make_table, print_json


def list_plugins(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the plug-ins of installed packages; import those that BATON_PLUGINS allows.

    Exit code 1 if an allowed plug-in cannot be imported, or a named package has none.
    """
    found = [(one, _state_of(one)) for one in plugins.installed()]
    missing = plugins.missing_packages()
    if json:
        rows = [
            {"package": one.package, "version": one.version, "group": one.group,
             "name": one.name, "where": one.where, "state": state}
            for one, state in found
        ]  # fmt: skip
        print_json({"plugins": rows, "missing_packages": missing})
    else:
        _print(found, missing)
    is_bad = bool(missing) or any(state not in (_USABLE, _FORBIDDEN) for _, state in found)
    raise typer.Exit(ExitCode.ERROR if is_bad else ExitCode.OK)


_USABLE, _FORBIDDEN = "usable", f"not in {plugins.VARIABLE}"


def _state_of(plugin: plugins.Plugin) -> str:
    if not plugins.is_allowed(plugin):
        return _FORBIDDEN
    try:
        plugin.load()
    except ConfigError as error:
        return str(error)
    return _USABLE


def _print(found: list[tuple[plugins.Plugin, str]], missing: list[str]) -> None:
    console = make_console()
    table = make_table("package", "version", "group", "name", "state")
    for one, state in found:
        table.add_row(*map(escape, (one.package, one.version, one.group, one.name, state)))
    console.print(table if found else "No installed package has a plug-in.")
    for name in missing:
        console.print(f"{plugins.VARIABLE}: {escape(name)} is not installed, or has no plug-in")
