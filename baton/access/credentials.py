"""Read a caller's credentials from gRPC calls and HTTP requests, without checking them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from baton.access.certificates import certificate_principal
from baton.access.identity import Credentials
from baton.api.errors import UnauthenticatedError
from baton.telemetry.spans import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from aiohttp import web

_AUTHORIZATION, _API_KEY = "authorization", "x-api-key"


def grpc_credentials(context: Any) -> Credentials:
    """Read the credentials of a gRPC call from its open context."""
    metadata = context.invocation_metadata() or ()
    shown = [str(value) for name, value in metadata if name == _AUTHORIZATION]
    return _credentials(shown, context, address_of(context.peer()))


def trace_headers(context: Any) -> tuple[str, str]:
    """Return the ``traceparent`` and ``tracestate`` (W3C) of a gRPC call; empty if not sent."""
    metadata = context.invocation_metadata() or ()
    found = {name: str(value) for name, value in metadata if name in (TRACEPARENT, TRACESTATE)}
    return found.get(TRACEPARENT, ""), found.get(TRACESTATE, "")


def http_credentials(request: web.BaseRequest) -> Credentials:
    """Read the credentials of an HTTP request: authorization header, or Anthropic's x-api-key."""
    shown = request.headers.getall(_AUTHORIZATION, [])
    shown += [f"Bearer {key}" for key in request.headers.getall(_API_KEY, [])]
    return _credentials(shown, request.transport, request.remote or "")


def page_credentials(request: web.BaseRequest) -> Credentials:
    """Read the credentials of a request for a page; browsers send them as name and password.

    The password is the API key; the name is ignored.
    """
    shown = http_credentials(request)
    scheme, _, given = shown.authorization.partition(" ")
    if scheme.lower() != "basic":
        return shown
    try:
        _, _, key = base64.b64decode(given, validate=True).decode().partition(":")
    # An invalid header is passed on as it is, and is then refused as a wrong key.
    except ValueError:
        return shown
    return dataclasses.replace(shown, authorization=f"Bearer {key}")


def address_of(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer.

    Names are ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``. Connections passed on by
    `RpcFront` are named ``unix:/tmp/baton-1/[::1]:7``.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        rest = rest.rpartition("/")[2]
    return rest.rpartition(":")[0].strip("[]")


def _credentials(shown: Sequence[str], source: Any, address: str) -> Credentials:
    """Make the credentials of a call.

    Args:
        shown: values of the call's authorization headers. Several values count as none, because a
            proxy may have checked another value than this program would check.
        source: object from which the client certificate is read; None: the connection is gone.
    """
    certificate, problem = None, ""
    try:
        certificate = None if source is None else certificate_principal(source)
    except UnauthenticatedError as error:
        problem = str(error)
    return Credentials(
        authorization=shown[0] if len(shown) == 1 else ", ".join(shown),
        certificate=certificate,
        certificate_problem=problem,
        address=address,
    )
