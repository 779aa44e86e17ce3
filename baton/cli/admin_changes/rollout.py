"""`baton admin rollout`: show and change which share of requests each revision of nodes gets."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from baton.cli.admin.connection import (
    AdminError,
    BaseModelOption,
    OutputFormat,
    OutputOption,
    connections,
)
from baton.cli.admin.output import (
    escape,
    format_count,
    is_json,
    make_console,
    make_table,
    to_plain,
)
from baton.cli.command_line import CommandLine
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from rich.table import Table

    from baton.v1 import admin_pb2

_Answer: TypeAlias = "tuple[str, admin_pb2.RolloutDescription | None, AdminError | None]"
_STYLES = {"serving": "green", "incomplete": "yellow", "undone": "red"}
_WITHOUT_NAME = "(none)"

rollout = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    help="See or change which revisions of nodes get requests. If a router's name has several "
    "addresses, all these routers are asked.",
)


class Action(enum.Enum):
    """Actions of `ChangeRollout`, with the numbers that the proto file gives them."""

    PAUSE = 1
    RESUME = 2
    UNDO = 3


@rollout.command("status")
def status(
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the revisions of the nodes, and the share of new requests that each gets."""
    _show(_ask_all(access, "GetRollout", model=base_model), output)


@rollout.command("pause")
def pause(
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Freeze the revisions' shares until `resume`, even if nodes join."""
    _show(_ask_all(access, "ChangeRollout", action=Action.PAUSE.value, model=base_model), output)


@rollout.command("resume")
def resume(
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let the shares follow the present nodes again; ends `pause` and `undo`."""
    _show(_ask_all(access, "ChangeRollout", action=Action.RESUME.value, model=base_model), output)


@rollout.command("undo")
def undo(
    revision: Annotated[
        str, typer.Argument(help="Revision to undo; the newest if not given.")
    ] = "",
    base_model: BaseModelOption = "",
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Place no new requests on a revision while another one is complete, until `resume`."""
    named = {"revision": revision} if revision else {}
    answers = _ask_all(access, "ChangeRollout", action=Action.UNDO.value, model=base_model, **named)
    _show(answers, output)


def _ask_all(access: OperatorAccess, method: str, **fields: Any) -> list[_Answer]:
    """Call a method of all routers, even if the call of one router fails."""
    answers: list[_Answer] = []
    for router, admin in connections(access):
        try:
            answers.append((router, admin.call(method, **fields), None))
        except AdminError as error:
            answers.append((router, None, error))
    return answers


def _show(answers: Sequence[_Answer], output: OutputFormat) -> None:
    """Print each router's answer; raise the error of a router whose call failed."""
    told = [(router, found) for router, found, _ in answers if found is not None]
    if is_json(output):
        _print_json(told)
    else:
        console = make_console()
        for router, found in told:
            prefix = f"{router}: " if len(answers) > 1 else ""
            console.print(f"{prefix}{found.state}")
            console.print(_table(found))
    for _, _, error in answers:
        if error is not None:
            raise error


def _print_json(answers: Sequence[tuple[str, admin_pb2.RolloutDescription]]) -> None:
    import json

    plain = [{"router": router, **to_plain(description)} for router, description in answers]
    typer.echo(json.dumps(plain, indent=2))


def _table(description: admin_pb2.RolloutDescription) -> Table:
    right = ("share", "prefill", "decode", "placed")
    table = make_table("revision", "state", *right, "nodes", right=right)
    for one in description.revisions:
        table.add_row(
            escape(one.revision or _WITHOUT_NAME),
            f"[{_STYLES[one.state]}]{one.state}[/]",
            f"{one.share:.0%}",
            str(one.num_prefill),
            str(one.num_decode),
            format_count(one.num_placed),
            escape(", ".join(one.nodes)),
        )
    return table
