"""`POST /v1/messages`, `/v1/messages/count_tokens`: Anthropic's API, answered by chat requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from baton.api.errors import BatonError
from baton.api.outputs import TextDelta
from router.api.anthropic_messages.cache_control import pinned_prefixes
from router.api.anthropic_messages.request import (
    FIELD_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    dropped_tools,
)
from router.api.http.chat import note_effort
from router.api.http.conversation import read_chat_prompt
from router.api.http.errors import ApiError, MessageError, message_error
from router.api.http.event_exchange import AnswerEvent, answer_in_events, as_fields
from router.api.http.exchange import ENTRY, PINNED, PRINCIPAL, SERVED, HttpOptions, read_body
from router.api.http.ignored_fields import note_ignored
from router.api.http.responses import MessageDelta, ToolCallDelta
from router.api.http.schema import ChatRequest
from router.calls.call import Call
from router.intake.parsers import NONE

_CUT_SHORT = ApiError(500, "the output was cut short on a node")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Replaces a call's arguments that are not a JSON object, because the output was cut short or the
# model made a mistake.
_NO_INPUT = msgspec.Raw(b"{}")


class TextBlock(msgspec.Struct):
    text: str = ""
    type: str = "text"


class ThinkingBlock(msgspec.Struct):
    thinking: str = ""
    signature: str = ""
    type: str = "thinking"


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw = _NO_INPUT
    type: str = "tool_use"


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of an answer; ``input_tokens`` includes no tokens of the two other counts.

    Attributes:
        cache_creation_input_tokens: number of computed prompt tokens that the request pinned.
        cache_read_input_tokens: number of prompt tokens that were found in a cache.
        output_tokens_details: number of tokens of the steps that produced only reasoning.
    """

    input_tokens: int
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnsweredMessage(msgspec.Struct, kw_only=True):
    """The message that answers a request; a stream begins with a message without content."""

    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"


class Event(AnswerEvent, omit_defaults=True):
    """An event of a streamed answer; the event's type decides which fields are present."""

    index: int | None = None
    message: AnsweredMessage | None = None
    content_block: Block | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None
    error: MessageError | None = None


class MessageEvents:
    """Builds one answer from content blocks, and the events that tell the client how blocks grow.

    A block stays open until a block of another kind begins or the answer ends. White space alone
    begins no text block, because templates put white space between reasoning, text and calls.
    """

    def __init__(self, model: str, call: Call) -> None:
        usage = MessageUsage(input_tokens=len(call.prompt_token_ids))
        self._message = AnsweredMessage(
            id=f"msg_{call.request_id}", model=model, content=[], usage=usage
        )
        self._max_tokens = call.sampling_params.max_tokens
        self._num_thinking_tokens = 0
        self._is_open = False
        self._parts: list[str] = []  # pieces of text of the open content block
        self._blanks = ""
        self._call_index = -1

    def first_events(self) -> Iterator[Event]:
        yield Event("message_start", message=msgspec.structs.replace(self._message, content=[]))

    def push(self, message: MessageDelta, num_tokens: int) -> Iterator[Event]:
        if message.reasoning_content:
            if not (message.content or message.tool_calls):
                self._num_thinking_tokens += num_tokens
            yield from self._push_text(ThinkingBlock, "thinking", message.reasoning_content)
        if message.content:
            text = self._blanks + message.content
            self._blanks = ""
            if text.isspace() and not self._is_text_open:
                self._blanks = text
            else:
                yield from self._push_text(TextBlock, "text", text)
        for call in message.tool_calls or ():
            yield from self._push_call(call)

    def last_events(self, reason: str, delta: TextDelta) -> Iterator[Event]:
        if reason == "abort":
            yield self.fail(_CUT_SHORT)
            return
        message = self._message
        if not message.content:  # an answer must have a text block, even if the text is empty
            yield from self._push_text(TextBlock, "text", self._blanks)
        yield from self._close()
        assert delta.receipt is not None
        num_cached = delta.receipt.num_cached_tokens
        num_pinned = max(delta.receipt.num_pinned_tokens - num_cached, 0)
        num_output_tokens = delta.receipt.num_output_tokens
        message.usage = MessageUsage(
            input_tokens=delta.receipt.num_prompt_tokens - num_cached - num_pinned,
            output_tokens=num_output_tokens,
            output_tokens_details=OutputTokensDetails(self._num_thinking_tokens),
            cache_creation_input_tokens=num_pinned,
            cache_read_input_tokens=num_cached,
        )
        message.stop_sequence = delta.stop_string
        message.stop_reason = _STOP_REASONS[reason]
        if delta.stop_string is not None:
            message.stop_reason = "stop_sequence"
        elif reason == "length" and num_output_tokens < self._max_tokens:
            message.stop_reason = "model_context_window_exceeded"
        told = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield Event("message_delta", delta=told, usage=message.usage)
        yield Event("message_stop")

    def fail(self, error: BatonError | ApiError) -> Event:
        return Event("error", error=message_error(error))

    def whole(self) -> AnsweredMessage:
        if self._message.stop_reason is None:
            raise _CUT_SHORT
        return self._message

    @property
    def _is_text_open(self) -> bool:
        return self._is_open and isinstance(self._message.content[-1], TextBlock)

    def _push_text(
        self, kind: type[TextBlock] | type[ThinkingBlock], field: str, text: str
    ) -> Iterator[Event]:
        if not (self._is_open and isinstance(self._message.content[-1], kind)):
            yield from self._begin(kind())
        self._parts.append(text)
        yield self._event("content_block_delta", delta={"type": f"{field}_delta", field: text})

    def _push_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.index != self._call_index:
            self._call_index = call.index
            yield from self._begin(ToolUseBlock(call.id or "", call.function.name or ""))
        if written := call.function.arguments:
            self._parts.append(written)
            yield self._event(
                "content_block_delta", delta={"type": "input_json_delta", "partial_json": written}
            )

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._blanks = ""
        self._is_open = True
        self._message.content.append(block)
        yield self._event("content_block_start", content_block=msgspec.structs.replace(block))

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._message.content[-1], "".join(self._parts)
        self._parts.clear()
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking = text
            case ToolUseBlock():
                block.input = _input(text)
        yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: Any) -> Event:
        """Make an event about the last content block."""
        return Event(kind, index=len(self._message.content) - 1, **fields)


def _input(arguments: str) -> msgspec.Raw:
    raw = arguments.encode()
    try:
        msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return _NO_INPUT
    return msgspec.Raw(raw)


async def messages(request: web.Request, options: HttpOptions) -> web.StreamResponse:
    """Answer a Messages request; `web.middleware` turns raised errors into responses."""
    received_at = request[ENTRY].began_at
    given = await read_body(request, MessagesRequest, options)
    body = chat_request(given)
    note_ignored(request, dropped_tools(given))
    _note_thinking(request, given, body)
    request[SERVED].intake.admission.check_key(request[PRINCIPAL])
    request[PINNED] = await pinned_prefixes(request, given, body)
    return await answer_in_events(
        request,
        body,
        received_at=received_at,
        names=FIELD_NAMES,
        make_events=functools.partial(MessageEvents, given.model),
    )


class TokenCount(msgspec.Struct):
    input_tokens: int


async def count_tokens(request: web.Request, options: HttpOptions) -> TokenCount:
    """Count a prompt's tokens; `web.middleware` turns raised errors into responses."""
    given = await read_body(request, CountTokensRequest, options)
    served = request[SERVED]
    intake = served.intake
    intake.admission.check_key(request[PRINCIPAL])
    body = chat_request(given)
    with as_fields(FIELD_NAMES):
        prompt = await read_chat_prompt(request, body, served)
        return TokenCount(len(await intake.reader.tokenize_only(prompt, request[PRINCIPAL])))


def _note_thinking(request: web.Request, given: MessagesRequest, body: ChatRequest) -> None:
    """Note the request's thinking fields as ignored if the model cannot follow them."""
    if given.thinking is None or given.thinking.type == "disabled":
        field = "output_config.effort" if given.thinking is None else "thinking"
        note_effort(request, body, field)
        return
    intake = request[SERVED].intake
    template = intake.tokenizer.chat_template if intake.tokenizer is not None else None
    can_be_told = template is not None and "enable_thinking" in template.variables
    # Without a reasoning parser the model never thinks.
    if not can_be_told and intake.abilities.parsers.reasoning_parser == NONE:
        note_ignored(request, ["thinking"])
    if given.output_config is not None:
        note_effort(request, body, "output_config.effort")
