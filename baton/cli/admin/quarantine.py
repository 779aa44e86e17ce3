"""`baton admin quarantine` and `release`: requests that are refused because nodes died of them."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.admin.connection import (
    OutputFormat,
    OutputOption,
    connection,
)
from baton.cli.admin.output import (
    escape,
    format_count,
    format_seconds,
    is_json,
    make_console,
    make_table,
    print_json,
)
from baton.cli.router_access import OperatorAccess

FingerprintArgument = Annotated[
    str, typer.Argument(help="Of `baton admin quarantine`, or how it begins; all: of all.")
]
_SHOWN_CHARS = 12


def quarantine(*, access: OperatorAccess, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the requests that are refused because nodes died while they computed one like it."""
    with connection(access) as admin:
        found = admin.call("ListQuarantine")
    if is_json(output):
        print_json(found)
        return
    console = make_console()
    if not found.requests:
        console.print("nothing is quarantined")
        return
    right = ("prompt", "refused", "left")
    columns = ("fingerprint", "request", "from", "prompt", "died with it", "refused", "left")
    table = make_table(*columns, right=right)
    for one in found.requests:
        table.add_row(
            one.fingerprint[:_SHOWN_CHARS],
            escape(one.request_id),
            escape(one.principal),
            format_count(one.num_prompt_tokens),
            escape("\n".join(one.engine_ids)),
            str(one.num_refused),
            format_seconds(one.left_s),
        )
    console.print(table)


def release(
    fingerprint: FingerprintArgument,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Refuse a quarantined request no longer."""
    name = "" if fingerprint == "all" else fingerprint
    with connection(access) as admin:
        found = admin.call("ReleaseQuarantine", fingerprint=name)
    if is_json(output):
        print_json(found)
    else:
        make_console().print(f"{found.num_released} released")
