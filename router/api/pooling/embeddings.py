"""`POST /v1/embeddings`: texts or token ids in, their embeddings out."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from router.api.http.exchange import SERVED, HttpOptions, read_body
from router.api.pooling.shared import (
    PooledFields,
    Texts,
    as_base64,
    check_only,
    inputs_of,
    pooled_requests,
    respond,
)

# ``input_type`` or ``task`` in the APIs of Cohere, Voyage, NVIDIA and Jina -> name of the
# checkpoint's prompt.
_PROMPT_OF_TYPE = {
    "search_query": "query",
    "search_document": "document",
    "passage": "document",
    "retrieval.query": "query",
    "retrieval.passage": "document",
}


class EmbeddingRequest(PooledFields, kw_only=True):
    """Body of ``POST /v1/embeddings``.

    Attributes:
        dimensions: number of leading values of each embedding to keep; the shortened embedding
            is normalized again.
        prompt_name: Baton's field: name of the checkpoint's prompt to put before each text; empty:
            no prompt.
        input_type: other APIs' field: whether the inputs are queries or documents. Selects the
            checkpoint's prompt for them, if the checkpoint has one.
        task: Jina's name of the field ``input_type``.
        embedding_type: Jina's name of the field ``encoding_format``.
        output_dtype, embed_dtype: Voyage's and vLLM's fields: data type of the numbers.
        normalized, normalize: Jina's and vLLM's fields: whether embeddings have length 1.
    """

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    embedding_type: Literal["float", "base64"] | None = None
    output_dtype: Literal["float"] | None = None
    embed_dtype: Literal["float32"] | None = None
    normalized: bool | None = None
    normalize: bool | None = None


class EmbeddingObject(msgspec.Struct):
    """One embedding, as a list of numbers or in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


async def embeddings(request: web.Request, options: HttpOptions) -> web.Response:
    """Answer a request for embeddings; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, EmbeddingRequest, options)
    setup = request[SERVED].intake.abilities.setup
    check_only(body, normalized=setup.normalizes, normalize=setup.normalizes)
    prompt_name, kind = body.prompt_name, body.input_type or body.task
    if prompt_name is None and kind is not None:
        named = _PROMPT_OF_TYPE.get(kind, kind)
        prompt_name = named if named in setup.prompts else None
    found = await pooled_requests(request, body).embed(
        inputs_of(body.input), prompt_name=prompt_name, dimensions=body.dimensions
    )
    in_base64 = (body.encoding_format or body.embedding_type) == "base64"
    items = (
        EmbeddingObject(index, as_base64(one.vector) if in_base64 else one.vector.tolist())
        for index, one in enumerate(found.results)
    )
    return await respond(request, body, found, items, "embd-")
