"""`baton certs dev`: makes certificates for trying TLS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.access.identity import NODE_KINDS, Role
from baton.api.errors import ConfigError
from baton.cli.command_line import CommandLine
from baton.cli.errors import CommandError

if TYPE_CHECKING:
    from baton.access.dev_certificates import Holder

ROUTER = "router"
_CALLER_ROLES = tuple(role.value for role in Role if role is not Role.JOIN)
_ROLE = re.compile(rf"({'|'.join(_CALLER_ROLES)})(-({'|'.join(_CALLER_ROLES)}))*")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

app = CommandLine(
    no_args_is_help=True, add_completion=False, help="Make certificates for trying TLS."
)


@app.callback()
def _root() -> None:
    """Make Typer keep a group of commands even if it has a single command."""


@app.command()
def dev(
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("baton-certs"),
    name: Annotated[
        str, typer.Option(help="Make only one certificate, for this name, with --role.")
    ] = "",
    role: Annotated[
        str,
        typer.Option(
            help=f"With --name: {ROUTER}, {', '.join(NODE_KINDS)}, or a caller's role: "
            f"{', '.join(_CALLER_ROLES)}, or several roles joined by '-'."
        ),
    ] = "",
    tenant: Annotated[
        str, typer.Option(help="With --name of a caller: its tenant; its name if empty.")
    ] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="More names and addresses of this machine, for the certificates of router and "
            "nodes."
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(help="Number of prefill nodes: p0, p1, ...", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode nodes: d0, d1, ...", min=0)] = 1,
    encode: Annotated[int, typer.Option(help="Number of encode nodes: e0, e1, ...", min=0)] = 0,
    days: Annotated[
        float, typer.Option(help="Days for which the certificates are valid.", min=0)
    ] = 30.0,
) -> None:
    """Make a throw-away CA with certificates for a router, nodes, a client and an operator.

    Do not use them in production, because the CA's key is in the same folder. If the folder already
        has a CA, the command reuses it.
    """
    from baton.access.dev_certificates import LOCAL_HOSTS, write_dev_certificates

    hosts = (*LOCAL_HOSTS, *(host or ()))
    try:
        if name or role or tenant:
            holders = [_one(name, role, tenant, hosts)]
        else:
            holders = _all(prefill, decode, encode, hosts)
        write_dev_certificates(out, holders, days=days)
    except (ConfigError, ValueError) as error:
        raise CommandError(str(error)) from None
    typer.echo(f"{out}: {', '.join(holder.name for holder in holders)}, for {days:g} days")
    typer.echo("NOT FOR PRODUCTION: whoever reads this folder can be anybody.")
    typer.echo(_next_commands(out))


def _all(
    num_prefill: int, num_decode: int, num_encode: int, hosts: tuple[str, ...]
) -> list[Holder]:
    from baton.access.dev_certificates import Holder

    nodes = [("prefill", f"p{i}") for i in range(num_prefill)]
    nodes += [("decode", f"d{i}") for i in range(num_decode)]
    nodes += [("encode", f"e{i}") for i in range(num_encode)]
    return [
        Holder(name=ROUTER, hosts=hosts),
        *(
            Holder(name=name, uri_paths=(f"node/{kind}/{name}",), hosts=hosts)
            for kind, name in nodes
        ),
        Holder(name="client", uri_paths=("infer/client",)),
        Holder(name="operator", uri_paths=("look-operate/operator",)),
    ]


def _one(name: str, role: str, tenant: str, hosts: tuple[str, ...]) -> Holder:
    """Return the holder of the one certificate that the options describe; raises ConfigError."""
    from baton.access.dev_certificates import Holder

    for option, text in (("name", name), *((("tenant", tenant),) if tenant else ())):
        if not _NAME.fullmatch(text) or text in ("ca", ".", ".."):
            raise ConfigError(
                f"{option}: must be 1 to 64 letters, digits, '.', '_' or '-' (and not 'ca'), "
                f"got {text!r:.100}"
            )
    if role == ROUTER:
        return Holder(name=name, hosts=hosts)
    if role in NODE_KINDS:
        return Holder(name=name, uri_paths=(f"node/{role}/{name}",), hosts=hosts)
    if not _ROLE.fullmatch(role):
        known = ", ".join((ROUTER, *NODE_KINDS, *_CALLER_ROLES))
        raise ConfigError(f"role: must be one of {known}, got {role!r}")
    owner = f"tenant/{tenant}/" if tenant else ""
    return Holder(name=name, uri_paths=(f"{owner}{role}/{name}",))


def _next_commands(out: Path) -> str:
    def options(name: str) -> str:
        return f"--tls-cert {out}/{name}.crt --tls-key {out}/{name}.key --tls-ca {out}/ca.crt"

    return f"""
All at once, on this machine:
  baton up --model MODEL --tls-folder {out}

One by one:
  baton router --model MODEL {options("router")} --tls-require-client-certs
  baton prefill --model MODEL --name p0 {options("p0")}
  baton decode --model MODEL --name d0 {options("d0")}

Then:
  baton generate {options("client")} "Hello"
  baton admin nodes {options("operator")}
  curl --cacert {out}/ca.crt --cert {out}/client.crt --key {out}/client.key https://127.0.0.1:8000/v1/models"""
