"""Requests of Anthropic's Messages API: their fields, and conversion to chat requests.

A chat message has one role and one kind of content. In Anthropic's API, a user's message may also
hold results of tool calls, and an assistant's message may hold reasoning, text and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from baton.api.errors import InvalidRequestError
from router.api.http.schema import (
    MAX_SHOWN_CHARS,
    ChatRequest,
    Constraint,
    ContentPart,
    Function,
    FunctionCall,
    Message,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    StructuredOutputs,
    ThinkingSwitch,
    Tool,
    ToolCall,
)
from router.intake.texts import check_num_messages

# Field of the chat request -> the client's field; errors show the name of the client's field.
FIELD_NAMES = {
    "prompt": "messages",
    "chat": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_Role = Literal["user", "assistant", "system"]
_BLOCKS = {
    "user": "text, image or tool_result",
    "assistant": "text, thinking or tool_use",
    "system": "text",
}
# Types of content blocks that are left out: blocks of tools that run on Anthropic's servers.
_ELSEWHERE = {
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
    "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "container_upload",
}  # fmt: skip
# Other fields of blocks, such as signature and is_error, are ignored.


class ImageSource(msgspec.Struct):
    """The source of an image block: the image itself in base64, or a URL.

    Attributes:
        type: ``base64`` or ``url``; files that Anthropic stores are refused.
    """

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class CacheControl(msgspec.Struct):
    """Marks the end of a prefix of the prompt that the client will send again.

    Attributes:
        ttl: how long to keep the prefix: ``5m`` (also for any other value) or ``1h``.
    """

    type: str = "ephemeral"
    ttl: str | None = None


class SystemBlock(ContentPart):
    """A text of the system prompt."""

    cache_control: CacheControl | None = None


class Block(msgspec.Struct):
    """One block of a message; its type decides which fields are present.

    Attributes:
        content: the result in a block of type ``tool_result``.
        source: the image in a block of type ``image``.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None
    source: ImageSource | None = None
    cache_control: CacheControl | None = None


class Turn(msgspec.Struct):
    """One message of the conversation, in Anthropic's form."""

    role: _Role
    content: str | list[Block]


class MessagesTool(msgspec.Struct):
    """A function that the model may call, or a tool that Anthropic would run, by its type."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Constraint):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How much effort the model spends on thinking, and the format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``: the fields that decide the prompt.

    Attributes:
        output_format: name of ``output_config.format`` in Anthropic's beta API.
        chat_template_kwargs: vLLM's field; works as in chat completions.
    """

    model: str
    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSwitch | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of ``POST /v1/messages``. None means that a field is absent.

    Attributes:
        metadata, service_tier: accepted without effect.
        cache_control: marks the end of the whole prompt; see `cache_control.py`.
        seed: like all fields below, a field of Baton and vLLM that works as in chat completions.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: CacheControl | None = None
    seed: int | None = None
    session_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None


_SAME = (
    "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "session_id", "priority",
    "cache_salt", "structured_outputs",
)  # fmt: skip


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """Convert a Messages request to the equivalent chat request; raises InvalidRequestError.

    If the last message is the assistant's, the answer continues this message.
    """
    if not request.messages:
        raise InvalidRequestError("messages", "must have at least 1 message, got 0")
    check_num_messages(len(request.messages))
    fields: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        fields = {name: getattr(request, name) for name in _SAME}
        fields["stop"] = request.stop_sequences
    messages = _messages(request)
    begins_answer = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=_tools(request.tools) if request.tools is not None else None,
        tool_choice=_tool_choice(request.tool_choice),
        continue_final_message=True if begins_answer else None,
        reasoning_effort=_effort(request),
        thinking=_thinking(request),
        chat_template_kwargs=request.chat_template_kwargs,
        response_format=_format(request),
        parallel_tool_calls=False if _calls_one(request.tool_choice) else None,
        **fields,
    )


@dataclass(slots=True)
class _Turn:
    """Collects consecutive blocks of one role, which become one chat message."""

    role: _Role
    parts: list[ContentPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=list(self.parts),
            reasoning_content="\n".join(self.thoughts) or None,
            tool_calls=self.calls or None,
        )


def _messages(request: CountTokensRequest) -> list[Message]:
    found: list[_Turn | Message] = []
    for index, turn in enumerate(request.messages):
        where, blocks = f"messages[{index}].content", turn.content
        if isinstance(blocks, str):
            blocks = [Block("text", blocks)]
        for number, block in enumerate(blocks):
            _add_block(found, turn.role, block, f"{where}[{number}]")
    if not found:
        raise InvalidRequestError("messages", "must have at least 1 block, got 0")
    messages = [one.message() if isinstance(one, _Turn) else one for one in found]
    if request.system:
        messages.insert(0, Message(role="system", content=_texts(request.system, "system")))
    return messages


def _add_block(found: list[_Turn | Message], role: _Role, block: Block, where: str) -> None:
    match role, block.type:
        case "user", "tool_result":
            call_id = _needed(block.tool_use_id, f"{where}.tool_use_id")
            content = _texts(block.content or "", f"{where}.content", of_a_tool=True)
            found.append(Message(role="tool", content=content, tool_call_id=call_id))
        case _, "text":
            if block.text is None:
                raise InvalidRequestError(f"{where}.text", "is needed")
            _last(found, role).parts.append(ContentPart("text", block.text))
        case "user", "image":
            url = _image_url(block.source, f"{where}.source")
            _last(found, role).parts.append(ContentPart("image_url", image_url=url))
        case "assistant", "thinking":
            _last(found, role).thoughts.append(block.thinking or "")
        case "assistant", "redacted_thinking":
            pass  # reasoning that only Anthropic can decrypt is left out
        case "assistant", kind if kind in _ELSEWHERE:
            pass  # left out, because the next text block contains the tool's result
        case "assistant", "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = FunctionCall(_needed(block.name, f"{where}.name"), arguments)
            call = ToolCall(function, _needed(block.id, f"{where}.id"))
            _last(found, role).calls.append(call)
        case _:
            shown = block.type[:MAX_SHOWN_CHARS]
            raise InvalidRequestError(f"{where}.type", f"must be {_BLOCKS[role]}, got {shown!r}")


def _image_url(source: ImageSource | None, where: str) -> str:
    """Return the URL of an image, or a data URL with the image; raises InvalidRequestError."""
    if source is None:
        raise InvalidRequestError(where, "is needed")
    if source.type == "url":
        return _needed(source.url, f"{where}.url")
    if source.type != "base64":
        shown = source.type[:MAX_SHOWN_CHARS]
        raise InvalidRequestError(f"{where}.type", f"must be base64 or url, got {shown!r}")
    kind = _needed(source.media_type, f"{where}.media_type")
    if "," in kind:
        raise InvalidRequestError(f"{where}.media_type", "must be a media type such as image/png")
    return f"data:{kind};base64,{_needed(source.data, f'{where}.data')}"


def _last(found: list[_Turn | Message], role: _Role) -> _Turn:
    """Return the last message in ``found`` if it has this role; else append an empty message."""
    if found and isinstance(found[-1], _Turn) and found[-1].role == role:
        return found[-1]
    turn = _Turn(role)
    found.append(turn)
    return turn


def _needed(value: str | None, where: str) -> str:
    if not value:
        raise InvalidRequestError(where, "is needed")
    return value


def _texts(
    content: str | Sequence[ContentPart], where: str, *, of_a_tool: bool = False
) -> str | list[ContentPart]:
    """Return a content, unchanged, after a check that it consists of texts only.

    Args:
        where: field of the content, for errors.
        of_a_tool: whether the content is a tool's result. Its other parts, such as images, are no
            error; see `unseen_results`.

    Raises InvalidRequestError naming the first part that is not a text.
    """
    if not isinstance(content, str):
        for index, part in enumerate(content):
            if of_a_tool and part.type != "text":
                continue
            if part.type != "text" or part.text is None:
                shown = part.type[:MAX_SHOWN_CHARS]
                raise InvalidRequestError(
                    f"{where}[{index}]", f"must be of type text with a text, got {shown!r}"
                )
    return content if isinstance(content, str) else list(content)


def dropped_tools(request: CountTokensRequest) -> list[str]:
    """List the tools that are dropped because Anthropic runs them, as names for headers."""
    return [f"tools.{tool.type}" for tool in request.tools or () if not _runs_here(tool)]


def _runs_here(tool: MessagesTool) -> bool:
    return tool.type in (None, "custom")


def _tools(tools: list[MessagesTool]) -> list[Tool]:
    return [
        Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in tools
        if _runs_here(tool)
    ]


def _tool_choice(
    choice: ToolChoice | None,
) -> Literal["none", "auto", "required"] | NamedToolChoice | None:
    if choice is None:
        return None
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return NamedToolChoice(NamedFunction(_needed(choice.name, "tool_choice.name")))
        case other:
            return other


def _calls_one(choice: ToolChoice | None) -> bool:
    return choice is not None and bool(choice.disable_parallel_tool_use)


def _effort(request: CountTokensRequest) -> str | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return request.output_config.effort if request.output_config is not None else None


def _thinking(request: CountTokensRequest) -> ThinkingSwitch | None:
    """Return the chat request's thinking switch; raises InvalidRequestError for a bad budget."""
    switch = request.thinking
    if switch is None or switch.budget_tokens is None:
        return switch
    field, budget = "thinking.budget_tokens", switch.budget_tokens
    if switch.type == "disabled":
        raise InvalidRequestError(field, "cannot be together with the type 'disabled'")
    if budget < 1:
        raise InvalidRequestError(field, f"must be 1 or more, got {budget}")
    if isinstance(request, MessagesRequest) and budget >= request.max_tokens:
        raise InvalidRequestError(
            field, f"must be less than max_tokens ({request.max_tokens}), got {budget}"
        )
    return switch


def _format(request: CountTokensRequest) -> ResponseFormat | None:
    config = request.output_config
    found = config.format if config is not None and config.format is not None else None
    if found is not None and request.output_format is not None:
        raise InvalidRequestError("output_format", "cannot be together with output_config.format")
    found = found or request.output_format
    return ResponseFormat("json_schema", schema=found.schema) if found is not None else None
