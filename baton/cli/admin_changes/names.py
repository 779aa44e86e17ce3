"""`baton admin names`: list and change the model names that clients may use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.adapters.digest import shorten_digest
from baton.cli.admin.connection import OutputFormat, OutputOption, ask
from baton.cli.admin.output import escape, make_console, make_table, show
from baton.cli.command_line import CommandLine
from baton.cli.errors import CommandError
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.v1 import admin_pb2

_USAGE = 2

names = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    help="See or change the model names that clients may use. A change is atomic: running requests "
    "end as they began. It lasts until the router's end, or beyond it with --names-file.",
)


@names.command("list")
def list_names(access: OperatorAccess, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the names, the default one first."""
    show(ask(access, "ListNames"), output, _print)


@names.command("alias")
def alias(
    name: Annotated[str, typer.Argument(help="A new name, or one to change.")],
    target: Annotated[
        str, typer.Argument(help="A served name, or a base model as given to --model.")
    ],
    *,
    adapter: Annotated[
        str | None,
        typer.Option(
            help='Digest of the adapter, 64 hex characters; "": none; not given: the target\'s.'
        ),
    ] = None,
    request_defaults: Annotated[
        str | None,
        typer.Option(help="Such as temperature=0.2,max_tokens=512; the target's if not given."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="A Jinja file; \"\": the base model's; the target's if not given."),
    ] = None,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let a name stand for a base model, or for what another name stands for now."""
    fields: dict[str, Any] = {"adapter": adapter, "request_defaults": request_defaults}
    if chat_template is not None:
        fields["chat_template"] = _read_template(chat_template)
    given = {field: value for field, value in fields.items() if value is not None}
    found = ask(access, "SetName", name=name, target=target, **given)
    show(found, output, lambda one: make_console().print(_table([one])))


@names.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="See `baton admin names list`.")],
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove a name; its running requests go on."""
    show(ask(access, "RemoveName", name=name), output, _print)


def _read_template(path: str) -> str:
    from baton.api.bounded_files import read_text

    try:
        return read_text(Path(path).expanduser()) if path else ""
    except (OSError, ValueError) as error:
        raise CommandError(f"chat_template: {path}: {error}", _USAGE) from None


def _print(found: admin_pb2.ListNamesResponse) -> None:
    make_console().print(_table(found.names))


def _table(found: Iterable[admin_pb2.NameDescription]) -> Any:
    table = make_table("name", "model", "adapter", "defaults", "template", "state", whole=("name",))
    for one in found:
        table.add_row(
            escape(one.name),
            escape(one.model),
            shorten_digest(one.adapter),
            escape(one.request_defaults),
            "own" if one.chat_template else "",
            f"[yellow]{escape(one.problem)}[/]" if one.problem else "[green]serving[/]",
        )
    return table
