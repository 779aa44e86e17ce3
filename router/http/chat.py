"""`POST /v1/chat/completions`: a conversation in, the assistant's message out."""

from __future__ import annotations

import time

from aiohttp import web

from baton.errors import InvalidRequestError
from baton.outputs import FinishReason, TextDelta
from router.choices import accept_choices
from router.http.conversation import chat_prompt, forced_call, output_parser
from router.http.exchange import PRINCIPAL, Exchange, generation_request, read_body
from router.http.logprobs import TokenTexts
from router.http.options import HttpOptions
from router.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    FunctionObject,
    MessageDelta,
    ToolCallDelta,
    ToolCallObject,
)
from router.http.sampling import as_client_wrote, sampling_params
from router.http.schema import ChatRequest
from router.http.tool_calls import OutputParser, ParsedCall
from router.intake import Intake


class ChatDialect:
    """Chat completions of one request.

    Args:
        parsers: one per output.
        texts: None when no logprobs are wanted.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, parsers: list[OutputParser], texts: TokenTexts | None) -> None:
        self._parsers = parsers
        self._texts = texts
        self._num_calls = [0] * len(parsers)
        self._begun = [False] * len(parsers)

    def chunk(self, index: int, delta: TextDelta) -> ChatChunkChoice:
        text, calls = self._parse(index, delta)
        first_call = self._num_calls[index] - len(calls)
        message = MessageDelta()
        if not self._begun[index]:
            self._begun[index] = True
            message = MessageDelta(role="assistant", content="")
        if text:
            message.content = text
        if calls:
            message.tool_calls = [
                ToolCallDelta(i, call.call_id, FunctionObject(call.name, call.arguments))
                for i, call in enumerate(calls, first_call)
            ]
        logprobs = self._logprobs(delta)
        finish_reason = self._finish_reason(index, delta.finish_reason)
        if message == MessageDelta() and finish_reason is None:
            message.content = ""  # a token without text is a step all the same
        return ChatChunkChoice(index, message, logprobs, finish_reason)

    def choice(self, index: int, delta: TextDelta) -> ChatChoice:
        text, calls = self._parse(index, delta)
        message = AssistantMessage(text)
        if calls:
            message.content = text if text.strip() else None
            message.tool_calls = [
                ToolCallObject(call.call_id, FunctionObject(call.name, call.arguments))
                for call in calls
            ]
        reason = self._finish_reason(index, delta.finish_reason)
        assert reason is not None
        return ChatChoice(index, message, self._logprobs(delta), reason)

    def _parse(self, index: int, delta: TextDelta) -> tuple[str, list[ParsedCall]]:
        parser = self._parsers[index]
        parts = list(parser.push(delta.text))
        if delta.finish_reason is not None:
            parts += parser.finish()
        calls = [part for part in parts if isinstance(part, ParsedCall)]
        self._num_calls[index] += len(calls)
        return "".join(part for part in parts if isinstance(part, str)), calls

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self._num_calls[index]:
            return "tool_calls"
        return reason.value if reason is not None else None

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._texts is None or not delta.logprobs:
            return None
        return self._texts.chat(delta.token_ids, delta.logprobs)


async def chat_completions(
    request: web.Request, intake: Intake, options: HttpOptions
) -> web.StreamResponse:
    """Raises what `web.middleware` turns into a response."""
    received_at = time.perf_counter()
    body = await read_body(request, ChatRequest, options)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequestError("modalities", 'must be ["text"]: the model writes nothing else')
    with as_client_wrote(body):
        forced = forced_call(body)
    intake.check_key(request[PRINCIPAL])  # before anything costs time
    prompt = await intake.tokenize(chat_prompt(body), request[PRINCIPAL])
    params = sampling_params(
        body,
        max_tokens=_max_tokens(body, intake.max_model_len - len(prompt)),
        logprobs=_num_logprobs(body),
        structured_output=forced,
    )
    generation = generation_request(request, body, prompt, params, received_at)
    with as_client_wrote(body):
        calls = await accept_choices(intake, generation)
    texts = TokenTexts(intake.tokenizer) if body.logprobs else None
    return await Exchange(
        request=request,
        intake=intake,
        body=body,
        calls=calls,
        num_choices=params.n,
        dialect=ChatDialect([output_parser(body) for _ in calls], texts),
    ).respond()


def _max_tokens(body: ChatRequest, room: int) -> int:
    """As many as fit, if the client does not say."""
    for given in (body.max_completion_tokens, body.max_tokens):
        if given is not None:
            return given
    return max(room, 1, body.min_tokens or 0)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs: true")
    return None
