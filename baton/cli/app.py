"""`baton`: every command in one place. Programs are imported when they are called."""

from __future__ import annotations

from typing import Any

import click
import typer
import typer.core
import typer.main

from baton.cli import certs, client_commands, keys, up
from baton.cli.admin import app as admin
from baton.registry import Registry
from baton.version import __version__

# Named by string: the ground knows that programs exist, not what is in them.
PROGRAMS: Registry[typer.Typer] = Registry(
    "program",
    {
        "router": "router.__main__:app",
        "prefill": "prefill_node.__main__:app",
        "decode": "decode_node.__main__:app",
        "sim-node": "sim_node.__main__:app",
        "loadtest": "loadtest.__main__:app",
    },
)


class _ProgramGroup(typer.core.TyperGroup):
    """The commands of this file and the programs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [
            "up",
            *PROGRAMS.names(),
            "generate",
            "chat",
            "admin",
            "keys",
            "certs",
            "version",
        ]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in PROGRAMS.names():
            command = typer.main.get_command(PROGRAMS.load(cmd_name))
            command.name = cmd_name
            return command
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_ProgramGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve large language models with prefill and decode on separate machines.",
)
app.command()(up.up)
app.command()(client_commands.generate)
app.command()(client_commands.chat)
app.add_typer(admin.app, name="admin")
app.add_typer(keys.app, name="keys")
app.add_typer(certs.app, name="certs")


@app.callback()
def _root() -> None:
    """Keeps the group a group."""


@app.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def main() -> None:
    """Entry point of the `baton` command."""
    app(prog_name="baton")
