"""Code that all paths of pooled requests share: fields, terms, usage, and responses in pieces."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from baton.api.errors import InvalidRequestError
from router.api.http.errors import REQUEST_ID
from router.api.http.exchange import ENTRY, PRINCIPAL, SERVED, SESSION_ID_HEADER
from router.api.http.responses import PromptTokensDetails, Receipts
from router.calls.call import Terms
from router.intake.pooled import Pooled, PooledRequests

Result = TypeVar("Result")
Texts = str | list[str | int | list[int]]


class PooledFields(msgspec.Struct, kw_only=True):
    """Fields that all pooled requests have. None: a field is absent.

    Attributes:
        model: a served name; None: the first name that the caller may use.
        cache_salt, session_id, priority, include_receipt: as in `http.schema`.
        user: accepted without effect.
        use_activation, activation: vLLM's fields: whether an activation function turns the
            model's logits into probabilities or scores.
        add_special_tokens: vLLM's field: whether texts get the checkpoint's special tokens.
        late_chunking: Jina's field: whether the inputs are chunks of one text.
    """

    model: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    include_receipt: bool | None = None
    user: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None
    late_chunking: bool | None = None


class PooledUsage(msgspec.Struct):
    """Token counts of a pooled request: only its inputs have tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class PooledResponse(msgspec.Struct, kw_only=True):
    """A response with one item per input; ``data`` is the list of items, encoded as JSON."""

    id: str
    object: str
    created: int
    model: str
    data: msgspec.Raw
    usage: PooledUsage
    baton: Receipts | UnsetType = UNSET


def pooled_requests(request: web.Request, body: PooledFields) -> PooledRequests:
    """Return the served model's `PooledRequests`, with the client's terms.

    Raises InvalidRequestError for a field whose value is not supported.
    """
    check_only(body, use_activation=True, activation=True, add_special_tokens=True)
    check_only(body, late_chunking=False)
    terms = Terms(
        received_at=request[ENTRY].began_at,
        session_id=body.session_id or request.headers.get(SESSION_ID_HEADER) or "",
        priority=body.priority or 0,
        principal=request[PRINCIPAL],
        cache_word=body.cache_salt or "",
        model=request[SERVED].name,
        adapter=request[SERVED].adapter,
        trace=request[ENTRY].trace,
    )
    return PooledRequests(request[SERVED].intake, terms, request[REQUEST_ID])


def check_only(body: PooledFields, **served: bool) -> None:
    """Raise InvalidRequestError if a field has another value than the only supported one.

    Args:
        served: the only supported value of each field; a field may also be absent.
    """
    for name, value in served.items():
        if getattr(body, name) not in (None, value):
            raise InvalidRequestError(name, f"must be {str(value).lower()} or absent")


async def respond(
    request: web.Request,
    body: PooledFields,
    pooled: Pooled[Result],
    items: Iterable[msgspec.Struct],
    prefix: str,
) -> web.Response:
    """Return a response with one item per input; items are encoded one at a time.

    Args:
        items: the items; each is computed when the iterator reaches it.
        prefix: prefix of the response's id.
    """
    request[ENTRY].num_prompt_tokens = pooled.num_prompt_tokens
    response = PooledResponse(
        id=prefix + request[REQUEST_ID],
        object="list",
        created=int(time.time()),
        model=request[SERVED].name,
        data=await encode_items(items),
        usage=usage_of(pooled),
        baton=receipts_of(body, pooled),
    )
    return web.Response(body=msgspec.json.encode(response), content_type="application/json")


async def encode_items(items: Iterable[msgspec.Struct]) -> msgspec.Raw:
    """Encode items as a JSON list, one at a time; let other tasks run in between."""
    parts = []
    for item in items:
        parts.append(msgspec.json.encode(item))
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def usage_of(pooled: Pooled[Any]) -> PooledUsage:
    """Return the token counts of a pooled request."""
    num_tokens = pooled.num_prompt_tokens
    details = PromptTokensDetails(pooled.num_cached_tokens)
    return PooledUsage(num_tokens, num_tokens, prompt_tokens_details=details)


def receipts_of(body: PooledFields, pooled: Pooled[Any]) -> Receipts | UnsetType:
    """Return the receipts of a request's calls if the client asks for them, else None."""
    return Receipts(pooled.receipts) if body.include_receipt else UNSET


def as_base64(vector: array[float]) -> str:
    """Encode an embedding as OpenAI's API does: little-endian float32 in base64."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def inputs_of(given: Texts, field: str = "input") -> list[str | list[int]]:
    """Return a list of inputs from any form that OpenAI allows; raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    token_ids = [item for item in given if isinstance(item, int)]
    if token_ids and len(token_ids) == len(given):
        return [token_ids]
    inputs = [item for item in given if not isinstance(item, int)]
    if len({type(item) for item in given}) > 1:
        raise InvalidRequestError(field, "must be all texts, all token ids or all lists of them")
    return inputs
