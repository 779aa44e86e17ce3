"""`baton keys`: makes API keys, checks key files, converts old key files."""

from __future__ import annotations

import datetime
import math
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from baton.access.api_keys import (
    SHORT_KEY_CHARS,
    ApiKey,
    convert_lines,
    draw_key,
    entry_text,
    is_expired,
    parse_keys,
    read_keys,
)
from baton.api.bounded_files import read_text
from baton.api.errors import BatonError, ConfigError, reason_of
from baton.cli.admin.output import escape, make_table
from baton.cli.command_line import CommandLine
from baton.processes.process import print_error

app = CommandLine(
    no_args_is_help=True,
    add_completion=False,
    help="Make and check the API keys of a router. docs/security.md describes the file.",
)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the key's owner.")],
    role: Annotated[
        list[str] | None,
        typer.Option(help="Role of the key: infer, look, operate or join; may be repeated."),
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="Tenant, whose keys share its requests; the name if empty.")
    ] = "",
    expires: Annotated[
        str, typer.Option(help="Last day (2027-01-31), or number of days from now (90d).")
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A served model that the key may use; may be repeated; all models if not given."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Append the entry to this file instead of printing it.")
    ] = None,
) -> None:
    """Print a new key, once, and its entry for the router's --api-keys-file, which is no secret."""
    key = draw_key()
    entry = entry_text(
        key,
        name,
        tenant=tenant,
        roles=role or ["infer"],
        expires=_expiry(expires),
        models=model or [],
    )
    if file is not None:
        _append(file, entry)
    typer.echo(key)
    if file is None:
        typer.echo(f"\n{entry}", nl=False)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="File as for --api-keys-file.")]) -> None:
    """Show what each key allows; exit code 1 if the file is invalid."""
    from rich.console import Console  # imported here, so that `--help` is fast

    keys = read_keys(file)
    table = make_table("name", "tenant", "roles", "expires", "models", "limits")
    for key in keys:
        table.add_row(*map(escape, _cells(key)))
    Console().print(table)


@app.command()
def convert(file: Annotated[Path, typer.Argument(help="File of name:key lines.")]) -> None:
    """Convert an old file with plain keys: print its entries in the present form."""
    try:
        text, short = convert_lines(read_text(file))
    except BatonError as error:
        print_error(f"{file}: {error}")
        raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        print_error(f"cannot read {file} ({reason_of(error)})")
        raise typer.Exit(1) from None
    typer.echo(text, nl=False)
    for name in short:
        typer.echo(
            f"warning: the key of {name} has less than {SHORT_KEY_CHARS} characters: who reads its "
            "hash could find it by trying; make it a new one",
            err=True,
        )


def _expiry(text: str) -> str:
    """Return the time of a key's expiry in the form that key files have; raises ConfigError."""
    if days := re.fullmatch(r"(\d{1,5})d", text):
        now = datetime.datetime.now(datetime.UTC)
        return (now + datetime.timedelta(days=int(days[1]))).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        return datetime.date.fromisoformat(text).isoformat() if text else ""
    except ValueError:
        raise ConfigError(f"expires: must be like 2027-01-31 or 90d, got {text!r:.100}") from None


def _append(path: Path, entry: str) -> None:
    """Add an entry to a key file, by replacing the file atomically; raises ConfigError.

    A router may read the file at any time.
    """
    try:
        before = read_text(path) if path.exists() else ""
        text = f"{before.rstrip()}\n\n{entry}".lstrip()
        parse_keys(text)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except ConfigError as error:
        raise ConfigError(f"file: {path}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"file: cannot write to {path} ({reason_of(error)})") from error


def _cells(key: ApiKey) -> tuple[str, ...]:
    who, limits = key.principal, key.principal.limits
    expires = "never"
    if key.expires_at != math.inf:
        at = datetime.datetime.fromtimestamp(key.expires_at, datetime.UTC)
        expires = at.strftime("%Y-%m-%d %H:%M") + (" EXPIRED" if is_expired(key) else "")
    default = type(limits)()
    given = [
        f"{name} {getattr(limits, name):g}"
        for name in type(limits).__dataclass_fields__
        if getattr(limits, name) != getattr(default, name)
    ]
    return (
        who.name,
        who.tenant,
        ", ".join(sorted(who.roles)),
        expires,
        ", ".join(sorted(who.models)) or "all",
        ", ".join(given) or "none",
    )
