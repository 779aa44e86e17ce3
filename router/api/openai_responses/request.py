"""Requests of the Responses API: their fields, and conversion to chat requests.

Every request carries the whole conversation, because nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from baton.api.errors import InvalidRequestError
from router.api.http.event_exchange import as_fields
from router.api.http.schema import (
    MAX_SHOWN_CHARS,
    ChatRequest,
    Constraint,
    ContentPart,
    FunctionCall,
    Message,
    NamedFunction,
    NamedToolChoice,
    ReasoningConfig,
    ResponseFormat,
    SharedFields,
    Tool,
    ToolCall,
)
from router.api.openai_responses.tools import INPUT, OfferedTools, ResponsesTool, read_tools
from router.intake.texts import check_num_messages

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ITEMS = "message, function_call, function_call_output or reasoning"
# Types of items that are left out: items of tools that OpenAI runs, or of data that OpenAI stores.
_ELSEWHERE = {
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "computer_call", "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response", "tool_search_call", "tool_search_output", "compaction",
    "ghost_snapshot",
}  # fmt: skip
# Field of the chat request -> the client's field; errors show the name of the client's field.
FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "chat": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class ItemPart(msgspec.Struct):
    """A part of an item: a text, or an image of type ``input_image``.

    Attributes:
        detail: accepted without effect.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputItem(msgspec.Struct):
    """One item of the conversation; the item's type decides which fields are present.

    Unknown fields, such as ids of earlier answers' items, are ignored.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    input: str | None = None
    namespace: str | None = None
    action: dict[str, Any] | None = None
    summary: list[ItemPart] | None = None


class ToolChoice(msgspec.Struct):
    """The client's choice of a tool, or of several tools.

    Attributes:
        mode, tools: present if the type is ``allowed_tools``: whether the model must call a tool,
            and the tools that it may call.
    """

    type: str = "function"
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolChoice] = []


class TextFormat(Constraint):
    """OpenAI's way to ask for JSON; the fields of a JSON Schema are fields of this object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesRequest(SharedFields, kw_only=True):
    """Body of ``POST /v1/responses``. None means that a field is absent.

    Attributes:
        previous_response_id, conversation, prompt: refused, because they refer to stored data.
        background: True is refused, since an answer cannot be fetched later.
        store: always treated as False.
        user: accepted without effect, as are all fields from here to ``safety_identifier``.
        chat_template_kwargs: works as in chat completions.
    """

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_STORED = ("previous_response_id", "conversation", "prompt")


def chat_request(request: ResponsesRequest, offered: OfferedTools | None = None) -> ChatRequest:
    """Convert a Responses request to the equivalent chat request; raises InvalidRequestError.

    Args:
        offered: the request's tools, if the caller has read them already.
    """
    offered = read_tools(request.tools) if offered is None else offered
    for name in _STORED:
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                name, "is not supported, as nothing is stored: give the conversation as input"
            )
    if request.background:
        raise InvalidRequestError("background", "is not supported, as nothing is stored")
    tools, tool_choice = _chosen(request.tool_choice, offered)
    same: dict[str, Any] = {name: getattr(request, name) for name in SharedFields.__struct_fields__}
    return ChatRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning=request.reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
        **same,
    )


def _messages(request: ResponsesRequest) -> list[Message]:
    messages = []
    if request.instructions is not None:
        messages.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    if not request.input:
        raise InvalidRequestError("input", "must have at least 1 item, got 0")
    with as_fields(FIELD_NAMES):
        check_num_messages(len(request.input))
    for index, item in enumerate(request.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[Message], item: InputItem, field: str) -> None:
    """Add an item of the conversation to the messages, as a new message or to the last one."""
    match item.type:
        case "message":
            if item.role is None:
                raise InvalidRequestError(f"{field}.role", "is needed")
            content = _content(item.content, f"{field}.content")
            turn = _open_turn(messages)
            if item.role == "assistant" and turn and not (turn.content or turn.tool_calls):
                turn.content = content
            else:
                messages.append(Message(role=item.role, content=content))
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else None
            # Reasoning from other servers may be encrypted, without any text.
            if text := "\n".join(_texts(parts or item.summary or [], f"{field}.content")):
                messages.append(Message(role="assistant", reasoning_content=text))
        case "function_call" | "custom_tool_call" | "local_shell_call":
            _add_call(messages, item, field)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            if not item.call_id:
                raise InvalidRequestError(f"{field}.call_id", "is needed")
            content = _output(item.output, f"{field}.output")
            messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        case other if other in _ELSEWHERE:
            pass  # left out, because the next message contains the result
        case other:
            raise InvalidRequestError(
                f"{field}.type", f"must be {_ITEMS}, got {other[:MAX_SHOWN_CHARS]!r}"
            )


def _add_call(messages: list[Message], item: InputItem, field: str) -> None:
    """Add a tool call to the last message, or to a new one if the last is not the assistant's."""
    name, arguments = item.name, item.arguments or ""
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({INPUT: item.input or ""}).decode()
    elif item.type == "local_shell_call":
        name, arguments = "local_shell", msgspec.json.encode(item.action or {}).decode()
    for needed, value in (("call_id", item.call_id), ("name", name)):
        if not value:
            raise InvalidRequestError(f"{field}.{needed}", "is needed")
    function = FunctionCall(OfferedTools().told_as(name or "", item.namespace), arguments)
    turn = _open_turn(messages)
    if turn is None:
        turn = Message(role="assistant")
        messages.append(turn)
    if turn.tool_calls is None:
        turn.tool_calls = []
    turn.tool_calls.append(ToolCall(function=function, id=item.call_id or ""))


def _open_turn(messages: list[Message]) -> Message | None:
    """Return the last message if it is the assistant's, so that items can be added; else None."""
    return messages[-1] if messages and messages[-1].role == "assistant" else None


def _content(content: str | list[ItemPart] | None, field: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(field, "is needed")
    return [_part(part, f"{field}[{index}]") for index, part in enumerate(content)]


def _part(part: ItemPart, field: str) -> ContentPart:
    if part.type != "input_image":
        return ContentPart("text", _text(part, field))
    if part.file_id is not None:
        raise InvalidRequestError(f"{field}.file_id", "is not supported, as nothing is stored")
    if not part.image_url:
        raise InvalidRequestError(f"{field}.image_url", "is needed")
    return ContentPart("image_url", image_url=part.image_url)


def _output(output: str | list[ItemPart] | None, field: str) -> str | list[ContentPart]:
    """Convert a tool's result for a chat message.

    Parts that are not texts keep only their type, so that `unseen_results` can name them.
    """
    if not isinstance(output, list):
        return _content(output, field)
    return [
        ContentPart("text", _text(part, f"{field}[{index}]"))
        if part.type in _TEXT_PARTS
        else ContentPart(part.type)
        for index, part in enumerate(output)
    ]


def _texts(parts: list[ItemPart], field: str) -> Iterator[str]:
    for index, part in enumerate(parts):
        yield _text(part, f"{field}[{index}]")


def _text(part: ItemPart, field: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS or text is None:
        shown = part.type[:MAX_SHOWN_CHARS]
        raise InvalidRequestError(
            field, f"must be of type input_text with a text, or input_image, got {shown!r}"
        )
    return text


def _chosen(
    choice: Literal["none", "auto", "required"] | ToolChoice | None, offered: OfferedTools
) -> tuple[list[Tool] | None, Literal["none", "auto", "required"] | NamedToolChoice | None]:
    """Return the tools that the chat offers, and the chat's tool choice."""
    if not isinstance(choice, ToolChoice):
        return offered.tools, choice
    if choice.type in ("function", "custom"):
        name = offered.told_as(choice.name, choice.namespace)
        return offered.tools, NamedToolChoice(NamedFunction(name))
    if choice.type != "allowed_tools":
        shown = choice.type[:MAX_SHOWN_CHARS]
        raise InvalidRequestError("tool_choice.type", f"{shown!r} is no tool that runs here")
    allowed = {offered.told_as(tool.name, tool.namespace) for tool in choice.tools}
    return [tool for tool in offered.tools or () if tool.function.name in allowed], choice.mode


def _format(text: TextConfig | None) -> ResponseFormat | None:
    given = text.format if text is not None else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_schema" and given.schema is None:
        raise InvalidRequestError("text.format.schema", "is needed")
    return ResponseFormat(given.type, schema=given.schema)
