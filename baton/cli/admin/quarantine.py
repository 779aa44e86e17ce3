"""`baton admin quarantine` and `release`: show or release requests that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.admin.connection import OutputFormat, OutputOption, ask
from baton.cli.admin.output import (
    escape,
    format_count,
    format_seconds,
    make_console,
    make_table,
    print_first_that_fits,
    show,
)
from baton.cli.router_access import OperatorAccess

if TYPE_CHECKING:
    from baton.v1 import admin_pb2

FingerprintArgument = Annotated[
    str,
    typer.Argument(
        help="Fingerprint, or its beginning, from `baton admin quarantine`; all: all fingerprints."
    ),
]
_SHOWN_CHARS = 12


def quarantine(*, access: OperatorAccess, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the requests that are refused because nodes died while computing an equal one."""
    show(ask(access, "ListQuarantine"), output, _print)


def _print(found: admin_pb2.ListQuarantineResponse) -> None:
    console = make_console()
    if not found.requests:
        console.print("nothing is quarantined")
        return
    wide, narrow = (
        make_table(*columns, right=("prompt", "refused", "left"), whole=("fingerprint", "request"))
        for columns in (
            ("fingerprint", "request", "from", "prompt", "died with it", "refused", "left"),
            ("fingerprint", "request", "died with it", "left"),
        )
    )
    for one in found.requests:
        first = one.fingerprint[:_SHOWN_CHARS], escape(one.request_id)
        engines, left = "\n".join(map(escape, one.engine_ids)), format_seconds(one.left_s)
        who, num_tokens = escape(one.principal), format_count(one.num_prompt_tokens)
        wide.add_row(*first, who, num_tokens, engines, str(one.num_refused), left)
        narrow.add_row(*first, engines, left)
    print_first_that_fits(console, wide, narrow)


def release(
    fingerprint: FingerprintArgument,
    *,
    access: OperatorAccess,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop refusing a quarantined request."""
    name = "" if fingerprint == "all" else fingerprint
    found = ask(access, "ReleaseQuarantine", fingerprint=name)
    show(found, output, lambda one: make_console().print(f"{one.num_released} released"))
