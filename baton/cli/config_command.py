"""`baton config show PROGRAM`: shows a program's options, and where each value comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from baton.cli.command_line import CommandLine
from baton.cli.config_file import PROGRAMS, place_of
from baton.cli.declared import make_or_refuse
from baton.cli.lazy_commands import lazy_group
from baton.cli.programs.entries import LOAD_TEST_ENTRIES, PROGRAM_ENTRIES
from baton.options import Option, options_of

_HELP = "Show the options that a program would use, and where each comes from."
_SECRET = "(given, and not shown)"


class _Shown(lazy_group(PROGRAM_ENTRIES | LOAD_TEST_ENTRIES)):  # a class made at run time
    """Group of all programs' commands, which show their options instead of running."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            shown = cmd_name.replace("loadtest-", "loadtest ")
            command.help = f"Show the options of `baton {shown}`, and where each comes from."
            command.invoke = lambda context: command.run_guarded(context, _show)
            for parameter in command.params:
                parameter.required = False
        return command


def _show(context: Any) -> None:
    """Print a line per option: name, value, and where the value comes from."""
    kind, values = PROGRAMS.load(context.info_name), context.params
    # Ends the command with an error if an option is invalid, instead of showing the options.
    make_or_refuse(kind, values)
    rows = [
        (one.name, _value(one, values[one.name]), _place(context, one)) for one in options_of(kind)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, place in rows:
        typer.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {place}")


def _value(option: Option, value: Any) -> str:
    if option.declaration.is_secret and value:
        return _SECRET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and (value or option.default != ""):
        return " ".join(value)
    if isinstance(value, list):
        return '""'
    return '""' if value == "" else str(getattr(value, "value", "" if value is None else value))


def _place(context: Any, option: Option) -> str:
    is_missing = option.default is dataclasses.MISSING and not context.params[option.name]
    return place_of(context, option.name) or ("must be given" if is_missing else "default")


app = CommandLine(add_completion=False, help=_HELP)
show = CommandLine(cls=_Shown, no_args_is_help=True, add_completion=False, help=_HELP)
app.add_typer(show, name="show")


@show.callback()
def _programs() -> None:
    """Exist so that Typer makes the app a group, although it has only one command."""
