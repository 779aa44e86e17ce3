"""`POST /tokenize`, `/detokenize`: convert texts or chats to token ids and back, as vLLM does."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from baton.api.errors import InvalidRequestError
from router.api.http.conversation import read_chat_prompt
from router.api.http.exchange import PRINCIPAL, SERVED, HttpOptions, read_body
from router.api.http.logprobs import TokenTexts
from router.api.http.schema import ChatRequest, Message, Tool
from router.intake.prompt_reader import Prompt


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a prompt, or messages with their options.

    Attributes:
        add_special_tokens: whether a text gets the checkpoint's special tokens. No effect on
            messages, because chat templates write special tokens themselves.
        return_token_strs: whether to return each token's text.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


async def tokenize(request: web.Request, options: HttpOptions) -> Tokenized:
    """Answer ``/tokenize``; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, TokenizeRequest, options)
    intake = request[SERVED].intake
    intake.admission.check_key(request[PRINCIPAL])
    token_ids = await intake.reader.tokenize_only(
        await _read_prompt(request, body),
        request[PRINCIPAL],
        add_special_tokens=body.add_special_tokens is not False,
    )
    answer = Tokenized(len(token_ids), intake.max_model_len, token_ids)
    if body.return_token_strs:
        texts = TokenTexts(intake.tokenizer)
        answer.token_strs = [texts.text(token_id) for token_id in token_ids]
    return answer


async def detokenize(request: web.Request, options: HttpOptions) -> Detokenized:
    """Answer ``/detokenize``; `web.middleware` turns raised errors into responses."""
    body = await read_body(request, DetokenizeRequest, options)
    intake = request[SERVED].intake
    intake.admission.check_key(request[PRINCIPAL])
    return Detokenized(await intake.reader.decode(body.tokens))


async def _read_prompt(request: web.Request, body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "or messages is needed, and not both")
    if body.prompt is not None:
        return body.prompt
    return await read_chat_prompt(
        request,
        ChatRequest(
            model=body.model or "",
            messages=body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        ),
        request[SERVED],
    )
