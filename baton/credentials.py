"""What a call shows of who makes it: of gRPC calls and of HTTP requests. Believes none of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from aiohttp import hdrs, web

from baton.certificates import certificate_principal
from baton.errors import UnauthenticatedError
from baton.identity import Credentials


def grpc_credentials(context: Any) -> Credentials:
    """Of a call, given gRPC's own context, while it is open."""
    metadata = dict(context.invocation_metadata() or ())
    address = address_of(context.peer())
    return _credentials(str(metadata.get("authorization", "")), context, address)


def http_credentials(request: web.BaseRequest) -> Credentials:
    """Of a request."""
    authorization = request.headers.get(hdrs.AUTHORIZATION, "")
    return _credentials(authorization, request.transport, request.remote or "")


def address_of(peer: str) -> str:
    """The machine's address in gRPC's ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest


def _credentials(authorization: str, source: Any, address: str) -> Credentials:
    """``source``: what a certificate came with; None: the connection is gone."""
    certificate, problem = None, ""
    try:
        certificate = None if source is None else certificate_principal(source)
    except UnauthenticatedError as error:
        problem = str(error)
    return Credentials(
        authorization=authorization,
        certificate=certificate,
        certificate_problem=problem,
        address=address,
    )
