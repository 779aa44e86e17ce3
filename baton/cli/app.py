"""`baton`: every command in one place. Each is imported when it is called, and not for the list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
import typer.main

from baton.cli.command_line import CommandGroup, CommandLine
from baton.registry import Registry
from baton.version import __version__


@dataclass(frozen=True, slots=True)
class _Entry:
    """A command: where it is, by name (the ground knows that programs exist, not what is in
    them), and the first line of its help."""

    where: str
    summary: str


_ENTRIES = {
    "up": _Entry(
        "baton.cli.up:up",
        "Start a router, prefill and decode nodes on this machine; Ctrl-C stops all of them.",
    ),
    "router": _Entry(
        "router.__main__:app",
        "Serve the public API and place requests on prefill and decode nodes.",
    ),
    "prefill": _Entry(
        "prefill_node.__main__:app",
        "Compute prompts, push their KV blocks to decode nodes, sample the first token.",
    ),
    "decode": _Entry(
        "decode_node.__main__:app",
        "Receive prompts' KV blocks from prefill nodes and decode in continuous batches.",
    ),
    "sim-node": _Entry(
        "sim_node.__main__:app",
        "Simulate prefill and decode nodes: the node protocol with a timing model, and no model.",
    ),
    "loadtest": _Entry("loadtest.__main__:app", "Measure a deployment under load."),
    "generate": _Entry(
        "baton.cli.client_commands:generate", "Complete a text; prints it as it is made."
    ),
    "chat": _Entry(
        "baton.cli.client_commands:chat",
        "Talk to the model; Ctrl-D ends it, Ctrl-C stops an answer.",
    ),
    "admin": _Entry("baton.cli.admin.app:app", "Operate a router and its nodes."),
    "keys": _Entry("baton.cli.keys:app", "Make and check the API keys of a router."),
    "certs": _Entry("baton.cli.certs:app", "Make certificates for trying TLS."),
    "version": _Entry("baton.cli.app:version", "Print the version."),
}
COMMANDS: Registry[Any] = Registry("command", {name: one.where for name, one in _ENTRIES.items()})


class _LazyGroup(CommandGroup):
    """All commands, none of them imported before it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS.names():
            return None
        found = COMMANDS.load(cmd_name)
        if not isinstance(found, typer.Typer):
            app = CommandLine(add_completion=False)
            app.command(cmd_name)(found)
            found = app
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        return [(name, one.summary) for name, one in _ENTRIES.items()]


app = CommandLine(
    cls=_LazyGroup,
    no_args_is_help=True,
    help="Serve large language models with prefill and decode on separate machines.",
    epilog="Every option of every command can be given as an environment variable, too: "
    "--max-model-len as BATON_MAX_MODEL_LEN.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keeps the group a group."""


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point of the `baton` command."""
    app(prog_name="baton")
