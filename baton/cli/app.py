"""`baton`: the command with all its sub-commands, each of which is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from baton.cli.command_line import HELP_NAMES, CommandLine
from baton.cli.lazy_commands import Entry, lazy_group, registry_of
from baton.cli.programs.entries import PROGRAM_ENTRIES
from baton.own_packages import prefer_own_packages
from baton.version import __version__

_ENTRIES = {
    **PROGRAM_ENTRIES,
    "config": Entry(
        "baton.cli.config_command:app",
        "Show the options that a program would use, and where each comes from.",
    ),
    "doctor": Entry(
        "baton.cli.doctor.command:doctor",
        "Show what this machine offers Baton, with advice for what is missing.",
    ),
    "plugins": Entry(
        "baton.cli.doctor.plugins:list_plugins",
        "List the plug-ins of installed packages; import those that BATON_PLUGINS allows.",
    ),
    "model": Entry("baton.cli.model_command:app", "Show how much memory a model needs."),
    "bench": Entry(
        "baton.cli.programs.bench:app",
        "Measure this machine, or a running system, and judge it in words.",
    ),
    "loadtest": Entry("baton.cli.programs.loadtest:app", "Measure a deployment under load."),
    "generate": Entry(
        "baton.cli.client_commands:generate", "Complete a text, and print the tokens as they come."
    ),
    "chat": Entry(
        "baton.cli.client_commands:chat",
        "Talk to the model; Ctrl-D ends it, Ctrl-C stops an answer.",
    ),
    "admin": Entry("baton.cli.admin.app:app", "Operate a router and its nodes."),
    "keys": Entry("baton.cli.keys:app", "Make and check the API keys of a router."),
    "certs": Entry("baton.cli.certs:app", "Make certificates for trying TLS."),
    "completion": Entry(
        "baton.cli.completion_command:completion",
        "Print a script for a shell to complete commands, options and names of nodes.",
    ),
    "version": Entry("baton.cli.app:version", "Print the version."),
}
COMMANDS = registry_of(_ENTRIES)
app = CommandLine(
    cls=lazy_group(_ENTRIES),
    no_args_is_help=True,
    help="Serve large language models with prefill and decode on separate machines.",
    epilog="Every option of every command can also be given as an environment variable: "
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
    """Exist so that Typer makes the app a group of commands."""


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the `baton` command."""
    prefer_own_packages()
    words = sys.argv[1:]
    if words[1:] and words[-1] in HELP_NAMES and (text := help_of(words[:-1])):
        typer.echo(text)
        return
    app(prog_name="baton")


def help_of(words: Sequence[str]) -> str:
    """Return the help of the command that these words call; empty if no command matches.

    The text equals the help that Typer prints, but Typer's parsing of flags, which imports
    Pydantic, is skipped.
    """
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="baton", **command.context_settings)
    for word in words:
        find = getattr(command, "get_command", None)
        command = find(context, word) if find is not None else None
        if command is None:
            return ""
        context = command.context_class(
            command, info_name=word, parent=context, **command.context_settings
        )
    text: str = command.get_help(context)
    return text
