"""The TLS options of all programs, declared once; `RouterAccess`: what clients' commands take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from baton.access.tls_options import TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.api.errors import ConfigError
from baton.cli.command_line import with_option_names

TlsCertOption = Annotated[
    str,
    typer.Option(
        help="PEM file of this program's certificate, and of those between it and its CA; read "
        "again when it changes. No TLS if neither this nor --tls-ca is given.",
    ),
]
TlsKeyOption = Annotated[str, typer.Option(help="PEM file of the private key of --tls-cert.")]
TlsCaOption = Annotated[
    str,
    typer.Option(
        help="PEM file of the CAs that the other side's certificate must be signed by; system: "
        "those of this machine (clients only).",
    ),
]
RequireClientCertsOption = Annotated[
    bool,
    typer.Option(
        "--tls-require-client-certs",
        help="Serve only who shows a certificate of --tls-ca. Of nodes and `baton admin` on "
        "--node-listen that is always wanted.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen where other machines can connect though TLS or authentication is missing.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAccess:
    """How a command reaches its router.

    Attributes:
        router: ``host:port``.
        token: of operators; empty: none.
        tls: what it shows, and whom it trusts.
    """

    router: str = DEFAULT_ADDRESS
    token: str = field(default="", repr=False)
    tls: TlsOptions = field(default_factory=TlsOptions)


def takes_access(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in place of its parameter ``access``, the options that it is made of.

    Args:
        options: besides those of TLS: annotated types by their names in `RouterAccess`.
    """
    tls = {"tls_cert": TlsCertOption, "tls_key": TlsKeyOption, "tls_ca": TlsCaOption}
    defaults = {"router": DEFAULT_ADDRESS}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            try:
                own = TlsOptions(**{name[4:]: values.pop(name) for name in tls})
            except ConfigError as error:
                from baton.processes.process import print_error  # here: else nobody waits for it

                print_error(with_option_names(str(error), tls))
                raise typer.Exit(2) from None
            access = RouterAccess(**{name: values.pop(name) for name in options}, tls=own)
            command(access=access, **values)

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name != "access":
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            parameters += [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(name, ""),
                    annotation=annotation,
                )
                for name, annotation in {**options, **tls}.items()
            ]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        del wrapped.__wrapped__  # or typer reads that one's types
        return wrapped

    return decorate
