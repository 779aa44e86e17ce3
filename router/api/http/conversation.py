"""A chat request's messages and tools, as chat templates and parsers of the answer expect them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.text.chat_template import ChatTemplate
from router.api.http.sampling import asked_format, asks_for_output
from router.api.http.schema import MAX_SHOWN_CHARS, ChatRequest, Message, NamedToolChoice, Tool
from router.intake.answers.call_forms import Function
from router.intake.parsers.base import ParserContext
from router.intake.parsers.choice import OutputParsers
from router.intake.texts import ChatPrompt, check_num_messages

_OURS = ("messages", "tools", "add_generation_prompt")


def chat_prompt(request: ChatRequest) -> ChatPrompt:
    """What the chat template is given; raises InvalidRequestError."""
    given = request.chat_template_kwargs or {}
    for name in _OURS:
        if name in given:
            raise InvalidRequestError("chat_template_kwargs", f"must not have {name}")
    if not request.messages:
        raise InvalidRequestError("messages", "must have at least 1 message, got 0")
    check_num_messages(len(request.messages))
    return ChatPrompt(
        [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)],
        tools=[_without_none(tool) for tool in offered_tools(request)],
        template_options={**_template_options(request), **given},
        continues_last=bool(request.continue_final_message),
        template=request.chat_template,
    )


def _template_options(request: ChatRequest) -> dict[str, Any]:
    """Variables of the template that have fields of their own."""
    options: dict[str, Any] = {}
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "cannot be together with add_generation_prompt"
            )
        options["add_generation_prompt"] = False
    elif request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.documents is not None:
        options["documents"] = request.documents
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            options["enable_thinking"] = False  # what Qwen's and others' templates call it
    return options


def takes_effort(effort: str, template: ChatTemplate | None) -> bool:
    """Whether a reasoning effort changes what the template makes of a conversation."""
    names = {"reasoning_effort", *(["enable_thinking"] if effort == "none" else ())}
    return template is not None and not names.isdisjoint(template.variables)


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Tools that the model is told of; none with ``tool_choice: "none"``."""
    return [] if request.tool_choice == "none" else request.tools or []


Grammars = Mapping[str, str]
"""Lark grammars of the one text of tools, by the names of these; empty: the schema says all."""
TEXT_ARGUMENT = "input"  # what the one parameter of such a tool is called


def parser_context(
    request: ChatRequest, prompt_end: str, grammars: Grammars | None = None
) -> ParserContext:
    """What the parsers of the answer may know of the request."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in offered_tools(request)}
    for name, grammar in (grammars or {}).items():
        if grammar and name in tools:  # then the text is written as JSON in every form
            tools[name] = {"type": "object", "properties": {TEXT_ARGUMENT: {}}}
    num_calls = sum(len(message.tool_calls or ()) for message in request.messages)
    return ParserContext(tools, prompt_end, num_calls)


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """What holds the output of a chat that has tools.

    Attributes:
        output: the grammar.
        is_common_call: the output is one call, in the form that is no family's.
        is_either: the output is an answer, or is calls.
        is_free: the output may be any text, or think, before calls.
    """

    output: StructuredOutput
    is_common_call: bool = False
    is_either: bool = False
    is_free: bool = False


def held_output(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars | None = None
) -> HeldOutput | None:
    """Make what holds the output to what the request says of its tools; None: nothing does.

    Raises InvalidRequestError.
    """
    held = _forced_calls(request, parsers, grammars or {})
    if held is None:
        held = _answer_or_calls(request, parsers, grammars or {})
    if held is None:
        held = _text_or_calls(request, parsers, grammars or {})
    return held


def _forced_calls(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars
) -> HeldOutput | None:
    """Make what holds the output to calls, if the request asks for that.

    Raises InvalidRequestError when the tool that must be called is not among the tools.
    """
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return None
    tools = offered_tools(request)
    is_named = isinstance(choice, NamedToolChoice)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            shown = name[:MAX_SHOWN_CHARS]
            raise InvalidRequestError("tool_choice", f"{shown!r} is not one of the tools")
    if not tools:
        raise InvalidRequestError("tool_choice", "is 'required', but there are no tools")
    functions = [_function(tool, grammars, is_held=True) for tool in tools]
    several = request.parallel_tool_calls is not False and not is_named
    grammar, is_common = parsers.forced_calls(functions, several=several)
    return HeldOutput(StructuredOutput(grammar=grammar), is_common_call=is_common)


def _answer_or_calls(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars
) -> HeldOutput | None:
    """Make what holds the output to calls, or to a text of the response format, if it may be both.

    A function that is ``strict`` is called with arguments that fit its schema.
    """
    tools, answer = offered_tools(request), asked_format(request)
    if request.tool_choice not in (None, "auto") or not tools or answer is None:
        return None
    if answer.kind not in ("json_schema", "json_object"):
        raise InvalidRequestError("response_format", "cannot be together with tools, but for JSON")
    several = request.parallel_tool_calls is not False
    grammar = parsers.answer_or_calls(
        answer.text or '{"type":"object"}',
        [_function(tool, grammars, is_held=bool(tool.function.strict)) for tool in tools],
        several=several,
    )
    return HeldOutput(StructuredOutput(grammar=grammar), is_either=True) if grammar else None


def _text_or_calls(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars
) -> HeldOutput | None:
    """Make what holds calls that may come in a text, if a tool's text has a grammar."""
    tools = offered_tools(request)
    if not any(tool.function.name in grammars for tool in tools) or asks_for_output(request):
        return None
    functions = [_function(tool, grammars, is_held=bool(tool.function.strict)) for tool in tools]
    several = request.parallel_tool_calls is not False
    grammar = parsers.text_or_calls(functions, several=several)
    return HeldOutput(StructuredOutput(grammar=grammar), is_free=True) if grammar else None


def open_formats(request: ChatRequest, grammars: Grammars) -> list[str]:
    """Name the formats of tools that the model is told, and that nothing holds it to."""
    names = (tool.function.name for tool in offered_tools(request))
    return [f"tools.{name}.format" for name in names if name in grammars]


def _function(tool: Tool, grammars: Grammars, *, is_held: bool) -> Function:
    """Return a tool as grammars of calls take it; raises InvalidRequestError.

    Args:
        is_held: the arguments are to fit the schema.
    """
    name = tool.function.name
    if grammars.get(name):
        return Function(name, held_text=(TEXT_ARGUMENT, grammars[name]))
    if not is_held:
        return Function(name)
    parameters = tool.function.parameters or {"type": "object", "properties": {}}
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        shown = name[:MAX_SHOWN_CHARS]
        raise InvalidRequestError("tools", f"parameters of {shown!r} must be of the type object")
    return Function(name, parameters)


def _message(message: Message, field: str) -> dict[str, Any]:
    # Templates know no developers: it is what OpenAI calls a system's message now.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message, field)}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments,
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _text(message: Message, field: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for i, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{field}.content[{i}]",
                f"must be of type text with a text, got {part.type[:MAX_SHOWN_CHARS]!r}",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _without_none(tool: Tool) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(tool)
    built["function"] = {k: v for k, v in built["function"].items() if v is not None}
    return built
