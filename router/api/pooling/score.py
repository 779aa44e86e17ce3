"""`POST /score` and `/v1/score`: how well texts fit one another, in vLLM's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.api.errors import InvalidRequestError
from router.api.http.exchange import HttpOptions, read_body
from router.api.pooling.shared import PooledFields, pooled_requests, respond


class ScoreRequest(PooledFields, kw_only=True):
    """Body of ``POST /v1/score``: queries and documents, under either of vLLM's names.

    Attributes:
        queries, text_1: one text for all documents, or one text per document.
        instruction: Baton's field: the task in words, for rerankers.
    """

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    instruction: str | None = None


class ScoreObject(msgspec.Struct):
    """The score of one pair of a query and a document."""

    index: int
    score: float
    object: str = "score"


async def score(request: web.Request, options: HttpOptions) -> web.Response:
    """Answer a request for scores; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, ScoreRequest, options)
    queries, query_field = _given(body, "queries", "text_1")
    documents, document_field = _given(body, "documents", "text_2")
    found = await pooled_requests(request, body).score(
        queries,
        documents,
        fields=(query_field, document_field),
        instruction=body.instruction or "",
    )
    items = (ScoreObject(index, one.score) for index, one in enumerate(found.results))
    return await respond(request, body, found, items, "score-")


def _given(body: ScoreRequest, name: str, other: str) -> tuple[list[str], str]:
    """Return the texts of a field that has two names, and the name that the client used."""
    given = [one for one in (name, other) if getattr(body, one) is not None]
    if len(given) != 1:
        raise InvalidRequestError(name, f"or {other} is needed, and not both")
    texts = getattr(body, given[0])
    return [texts] if isinstance(texts, str) else texts, given[0]
