"""RouterAccess: options by which commands reach a router, with a client's or an operator's key."""

from __future__ import annotations

from dataclasses import dataclass

from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.addresses import DEFAULT_ADDRESS
from baton.options import group, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAccess:
    """Options for the router's address and for the caller's certificates."""

    router: str = option(DEFAULT_ADDRESS, help="host:port of the router.")
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess(RouterAccess):
    """Options to reach a router with a client's API key."""

    api_key: str = option(
        "",
        is_secret=True,
        variable="BATON_API_KEY",
        help="API key, if the router asks for one (baton keys new).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAccess(RouterAccess):
    """Options to reach a router with an operator's token."""

    token: str = option(
        "",
        is_secret=True,
        variable="BATON_ADMIN_TOKEN",
        help="An API key with the role look or operate, or the router's --admin-token.",
    )
