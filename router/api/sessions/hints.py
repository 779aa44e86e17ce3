"""`POST /v1/sessions/prefetch` keeps a session's prefix; `/v1/sessions/drop` ends its pins."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.api.errors import InvalidRequestError
from baton.kv.pins import check_ttl
from router.api.http.exchange import PRINCIPAL, SERVED, HttpOptions, read_body
from router.intake.cache_hints import retention_s, send_hint, session_hint


class DropRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/sessions/drop``; either session_id or prompt_cache_key is needed."""

    model: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None


class PrefetchRequest(DropRequest, kw_only=True):
    """Body of ``POST /v1/sessions/prefetch``.

    Attributes:
        ttl: time for which to keep the session's prefix: seconds, or a text such as ``30s``.
    """

    ttl: float | str


class HintedSession(msgspec.Struct):
    """Answer to both calls; ``num_nodes`` is the number of nodes that got the command."""

    num_nodes: int
    object: str = "session"


async def answer_prefetch(request: web.Request, options: HttpOptions) -> HintedSession:
    """Answer a prefetch call; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, PrefetchRequest, options)
    ttl_s = retention_s(body.ttl) if isinstance(body.ttl, str) else body.ttl
    if ttl_s is None:
        raise InvalidRequestError("ttl", "must be seconds, or a number with the unit s, m or h")
    check_ttl(ttl_s, "ttl")
    return _hint(request, body, ttl_s)


async def answer_drop(request: web.Request, options: HttpOptions) -> HintedSession:
    """Answer a drop call; `web.middleware` turns raised errors into responses."""
    return _hint(request, await read_body(request, DropRequest, options), 0.0)


def _hint(request: web.Request, body: DropRequest, keep_s: float) -> HintedSession:
    principal, served = request[PRINCIPAL], request[SERVED]
    hint = session_hint(principal, body.session_id or "", body.prompt_cache_key or "", keep_s)
    served.intake.admission.charge_hint(principal)
    return HintedSession(send_hint(served.base.pool, hint))
