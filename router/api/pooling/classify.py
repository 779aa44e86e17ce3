"""`POST /classify`: the labels of texts, in vLLM's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from router.api.http.exchange import HttpOptions, read_body
from router.api.pooling.shared import PooledFields, Texts, inputs_of, pooled_requests, respond


class ClassifyRequest(PooledFields, kw_only=True):
    """Body of ``POST /classify``."""

    input: Texts


class ClassifiedObject(msgspec.Struct):
    """The most probable label of one input, and the probabilities of all labels."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int
    object: str = "classification"


async def classify(request: web.Request, options: HttpOptions) -> web.Response:
    """Answer a request for labels; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, ClassifyRequest, options)
    found = await pooled_requests(request, body).classify(inputs_of(body.input))
    items = (
        ClassifiedObject(index, one.label, one.probabilities, len(one.probabilities))
        for index, one in enumerate(found.results)
    )
    return await respond(request, body, found, items, "classify-")
