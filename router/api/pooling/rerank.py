"""`POST /rerank`, `/v1/rerank` and `/v2/rerank`: documents in the order in which they fit a query.

The fields of requests and responses are those of Cohere's API (versions 1 and 2) and of Jina's.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from baton.api.errors import InvalidRequestError
from router.api.http.errors import REQUEST_ID
from router.api.http.exchange import ENTRY, SERVED, HttpOptions, read_body
from router.api.http.responses import Receipts
from router.api.pooling.shared import (
    PooledFields,
    PooledUsage,
    encode_items,
    pooled_requests,
    receipts_of,
    usage_of,
)

_VERSION_2 = "/v2/"
_UNIT_DOCUMENTS = 100  # Cohere counts usage in search units of this many documents


class Document(msgspec.Struct):
    """A document given as an object; only its text is used."""

    text: str


class RerankRequest(PooledFields, kw_only=True):
    """Body of ``POST /v1/rerank``.

    Attributes:
        top_n: maximum number of results; None: all.
        return_documents: whether results contain the documents; None: true, except in version 2.
        instruction: Baton's field: the task in words, for rerankers.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RankedObject(msgspec.Struct):
    """The score of one document, and the document's index in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class ApiVersion(msgspec.Struct):
    version: str


class BilledUnits(msgspec.Struct):
    search_units: int


class Meta(msgspec.Struct):
    """The usage of a request, in the form of Cohere's API."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct, kw_only=True):
    """The results, best first, with the usage fields of Cohere's and Jina's APIs."""

    id: str
    model: str
    results: msgspec.Raw
    usage: PooledUsage
    meta: Meta
    baton: Receipts | UnsetType = UNSET


async def rerank(request: web.Request, options: HttpOptions) -> web.Response:
    """Answer a request to rank documents; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, RerankRequest, options)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequestError("top_n", f"must be 1 or more, got {body.top_n}")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    found = await pooled_requests(request, body).score(
        [body.query],
        texts,
        fields=("query", "documents"),
        instruction=body.instruction or "",
    )
    request[ENTRY].num_prompt_tokens = found.num_prompt_tokens
    is_version_2 = request.path.startswith(_VERSION_2)
    shown = body.return_documents
    shows = (not is_version_2) if shown is None else shown
    best = sorted(enumerate(found.results), key=lambda one: (-one[1].score, one[0]))
    items = (
        RankedObject(index, one.score, Document(texts[index]) if shows else UNSET)
        for index, one in best[: body.top_n]
    )
    units = BilledUnits(-(-len(texts) // _UNIT_DOCUMENTS))
    response = RerankResponse(
        id="rerank-" + request[REQUEST_ID],
        model=request[SERVED].name,
        results=await encode_items(items),
        usage=usage_of(found),
        meta=Meta(ApiVersion("2" if is_version_2 else "1"), units),
        baton=receipts_of(body, found),
    )
    return web.Response(body=msgspec.json.encode(response), content_type="application/json")
