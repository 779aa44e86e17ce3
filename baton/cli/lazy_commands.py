"""Lazy command groups: list commands without importing them, so that help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
import typer.main

from baton.cli.command_line import CommandGroup, CommandLine
from baton.registry import Registry


@dataclass(frozen=True, slots=True)
class Entry:
    """A command that is not imported yet: its place as text, and the first line of its help."""

    where: str
    summary: str


def registry_of(entries: Mapping[str, Entry]) -> Registry[Any]:
    """Return a registry that imports a command when it is needed."""
    return Registry("command", {name: one.where for name, one in entries.items()})


def lazy_group(entries: Mapping[str, Entry]) -> type[CommandGroup]:
    """Return the class of a command group whose commands are imported when they are called."""
    commands = registry_of(entries)

    class LazyGroup(CommandGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return commands.names()

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in entries:
                return None
            found = commands.load(cmd_name)
            if not isinstance(found, typer.Typer):
                app = CommandLine(add_completion=False)
                app.command(cmd_name)(found)
                found = app
            command = typer.main.get_command(found)
            command.name = cmd_name
            return command

        def summaries(self, ctx: Any) -> list[tuple[str, str]]:
            return [(name, one.summary) for name, one in entries.items()]

    return LazyGroup
