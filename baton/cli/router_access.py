"""RouterAccess: how a command reaches its router; OperatorAccess: how an operator's does."""

from __future__ import annotations

from dataclasses import dataclass

from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.options import group, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAccess:
    """Which router, and what is shown to it."""

    router: str = option(DEFAULT_ADDRESS, help="host:port of the router.")
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAccess(RouterAccess):
    """The same, and an operator's token."""

    token: str = option(
        "",
        is_secret=True,
        variable="BATON_ADMIN_TOKEN",
        help="An API key with the role look or operate, or the router's --admin-token.",
    )
