"""Outputs of the Responses API: an answer as items, and the events that tell how items grow.

deltas of a chat -> Items -> items of the answer, and events of a stream
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from baton.api.sampling_params import SamplingParams
from baton.text.call_arguments import read_arguments
from router.api.http.event_exchange import AnswerEvent
from router.api.http.responses import MessageDelta, ToolCallDelta, Usage
from router.api.openai_responses.request import ResponsesRequest
from router.api.openai_responses.tools import INPUT, OfferedTools


class OutputText(msgspec.Struct):
    text: str = ""
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct):
    text: str = ""
    type: str = "reasoning_text"


class MessageItem(msgspec.Struct):
    id: str
    content: list[OutputText]
    status: str = "in_progress"
    role: str = "assistant"
    type: str = "message"


class ReasoningItem(msgspec.Struct):
    id: str
    content: list[ReasoningText]
    status: str = "in_progress"
    summary: list[Any] = []
    type: str = "reasoning"


class CallItem(msgspec.Struct):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    type: str = "function_call"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomCallItem(msgspec.Struct):
    """A call of a custom tool, whose input is a text instead of JSON."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: str = "in_progress"
    type: str = "custom_tool_call"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Event(AnswerEvent, omit_defaults=True):
    """An event of a streamed answer; the event's type decides which fields are present."""

    sequence_number: int = -1
    response: dict[str, Any] | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: Item | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[Any] | None = None


class Items:
    """Builds the items of one answer as its parts arrive.

    An item stays open until an item of another kind begins or the answer ends.

    Args:
        offered: tools that the model may call.

    Attributes:
        items: all items that have begun; the last one may be open.
        num_reasoning_tokens: number of tokens of the steps that gave only reasoning.
    """

    def __init__(self, offered: OfferedTools | None = None) -> None:
        self._offered = offered or OfferedTools()
        self.items: list[Item] = []
        self.num_reasoning_tokens = 0
        self._is_open = False
        self._parts: list[str] = []  # pieces of text of the open item
        self._call_index = -1

    def push(self, message: MessageDelta, num_tokens: int) -> Iterator[Event]:
        """Add the next ``num_tokens`` tokens of the answer; yield the events for them."""
        if message.reasoning_content:
            if not (message.content or message.tool_calls):
                self.num_reasoning_tokens += num_tokens
            yield from self._begin_text(ReasoningItem)
            yield self._text_event(f"{self._words()}.delta", delta=message.reasoning_content)
            self._parts.append(message.reasoning_content)
        if message.content:
            yield from self._begin_text(MessageItem)
            yield self._text_event(f"{self._words()}.delta", delta=message.content)
            self._parts.append(message.content)
        for call in message.tool_calls or ():
            yield from self._push_call(call)

    def end_answer(self, status: str) -> Iterator[Event]:
        """Close the open item with a status; yield the events for it."""
        if not self.items:  # an answer must have a message, even if the message is empty
            yield from self._begin_text(MessageItem)
        yield from self._close(status)

    def _begin_text(self, kind: type[MessageItem] | type[ReasoningItem]) -> Iterator[Event]:
        if self._is_open and isinstance(self.items[-1], kind):
            return
        yield from self._close("completed")
        item: Item
        if kind is MessageItem:
            item = MessageItem(f"msg_{uuid.uuid4().hex}", [])
        else:
            item = ReasoningItem(f"rs_{uuid.uuid4().hex}", [])
        yield from self._open(item)
        part = OutputText() if isinstance(item, MessageItem) else ReasoningText()
        yield self._part_event("response.content_part.added", part)

    def _push_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.index != self._call_index:
            yield from self._close("completed")
            self._call_index = call.index
            yield from self._open(self._call_item(call))
        if call.function.arguments:
            self._parts.append(call.function.arguments)
            if isinstance(self.items[-1], CustomCallItem):
                # A custom tool's text arrives as JSON, which can be parsed only at the call's end
                return
            yield self._event(
                "response.function_call_arguments.delta", delta=call.function.arguments
            )

    def _call_item(self, call: ToolCallDelta) -> CallItem | CustomCallItem:
        told, call_id = call.function.name or "", call.id or ""
        namespace, name = self._offered.namespaces.get(told, (msgspec.UNSET, told))
        if told in self._offered.custom:
            return CustomCallItem(f"ctc_{uuid.uuid4().hex}", call_id, name, namespace=namespace)
        return CallItem(f"fc_{uuid.uuid4().hex}", call_id, name, namespace=namespace)

    def _open(self, item: Item) -> Iterator[Event]:
        self.items.append(item)
        self._is_open = True
        yield Event("response.output_item.added", output_index=self._index, item=_copy(item))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._parts)
        self._parts.clear()
        if isinstance(item, CallItem):
            item.arguments = text
            yield self._event(
                "response.function_call_arguments.done", arguments=text, name=item.name
            )
        elif isinstance(item, CustomCallItem):
            item.input = _input_of(text)
            kind = "response.custom_tool_call_input"
            yield self._event(f"{kind}.delta", delta=item.input)
            yield self._event(f"{kind}.done", input=item.input)
        else:
            yield self._text_event(f"{self._words()}.done", text=text)
            part: OutputText | ReasoningText
            if isinstance(item, MessageItem):
                part = OutputText(text)
                item.content = [part]
            else:
                part = ReasoningText(text)
                item.content = [part]
            yield self._part_event("response.content_part.done", part)
        item.status = status
        yield Event("response.output_item.done", output_index=self._index, item=_copy(item))

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _words(self) -> str:
        kind = "output_text" if isinstance(self.items[-1], MessageItem) else "reasoning_text"
        return f"response.{kind}"

    def _event(self, kind: str, **fields: Any) -> Event:
        """Make an event about the open item."""
        return Event(kind, output_index=self._index, item_id=self.items[-1].id, **fields)

    def _text_event(self, kind: str, **fields: Any) -> Event:
        if isinstance(self.items[-1], MessageItem):
            fields["logprobs"] = []
        return self._event(kind, content_index=0, **fields)

    def _part_event(self, kind: str, part: OutputText | ReasoningText) -> Event:
        return self._event(kind, content_index=0, part=part)


def _input_of(arguments: str) -> str:
    """Return the text in a custom tool's call; return the raw arguments if they have no text."""
    found = read_arguments(arguments).get(INPUT)
    return found if isinstance(found, str) else arguments


def _copy(item: Item) -> Item:
    """Copy an item for an event, because the item changes while the answer grows."""
    return msgspec.structs.replace(item)


class ResponseHead:
    """Fields of the request that every response object repeats.

    Args:
        request_id: id of the request; the answer's id is made from it.
        params: the sampling parameters, with defaults for those that the request omits.
    """

    def __init__(self, request: ResponsesRequest, request_id: str, params: SamplingParams) -> None:
        self._fields: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format_of(request)},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def response(
        self,
        status: str,
        items: list[Item] | None = None,
        *,
        usage: ResponseUsage | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the response object with this status and these items."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fields,
            "status": status,
            "output": items or [],
            "usage": usage,
            "error": error,
            "incomplete_details": incomplete,
        }


def _format_of(request: ResponsesRequest) -> dict[str, Any]:
    told = request.text.format if request.text is not None else None
    if told is None:
        return {"type": "text"}
    return {name: value for name, value in msgspec.structs.asdict(told).items() if value}


def response_usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    """Convert a chat's usage to the form of the Responses API."""
    details = usage.prompt_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(details.cached_tokens if details is not None else 0),
        usage.completion_tokens,
        OutputTokensDetails(num_reasoning_tokens),
        usage.total_tokens,
    )
