"""Convert a chat request's messages and tools to the input of chat templates and parsers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import MAX_TEXT_BYTES, StructuredOutput
from baton.api.thinking import Thinking, check_budget
from baton.text.chat_template import ChatTemplate
from router.api.http.exchange import PRINCIPAL
from router.api.http.sampling import asked_format, asks_for_output
from router.api.http.schema import (
    MAX_SHOWN_CHARS,
    ChatRequest,
    ContentPart,
    ImageUrl,
    Message,
    NamedToolChoice,
    Tool,
)
from router.api.images.image_fetch import FETCHER
from router.intake.answers.call_forms import Function
from router.intake.parsers.base import ParserContext
from router.intake.parsers.choice import AskedThinking, OutputParsers
from router.intake.texts import ChatPrompt, check_num_messages
from router.names.served_name import ServedName

# Effort level -> budget of thinking tokens (None: no limit), for models whose template does not
# know effort levels.
EFFORT_BUDGETS: dict[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 1_024,
    "medium": 8_192,
    "high": 24_576,
    "xhigh": None,
    "max": None,
}
# Variables of chat templates that switch thinking on or off: ``enable_thinking`` in most models
# (such as Qwen), ``thinking`` in DeepSeek and Granite.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT_VARIABLES = frozenset(("reasoning_effort", *_SWITCHES))
_OURS = ("messages", "tools", "add_generation_prompt")


def chat_prompt(request: ChatRequest, named_template: str = "") -> ChatPrompt:
    """Return a request's conversation as the input of the chat template.

    Raises InvalidRequestError.

    Args:
        named_template: chat template of the served name; empty: the checkpoint's template is used.
    """
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
        named_template=named_template,
    )


async def read_chat_prompt(
    request: web.Request, body: ChatRequest, served: ServedName
) -> ChatPrompt:
    """Return the input of the chat template, with the image files that messages name.

    Raises:
        InvalidRequestError: a message is wrong, the model takes no images, or an image is refused.
    """
    prompt = chat_prompt(body, served.chat_template)
    found = list(_images_of(body.messages))
    if not found:
        return prompt
    reader = served.intake.reader.image_reader(found[0][0])
    reader.options.check_count("messages", len(found))
    urls = [(field, _url_of(part, field)) for field, part in found]
    files = await request.app[FETCHER].read_files(urls, reader, request[PRINCIPAL].tenant)
    for _, part in found:
        # Frees the base64 text, which is larger than the file, while a stream runs
        part.image_url = None
    return dataclasses.replace(prompt, images=files)


def _template_options(request: ChatRequest) -> dict[str, Any]:
    """Return the template variables that the request sets by fields of their own."""
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
    if (effort := effort_of(request)) is not None:
        options["reasoning_effort"] = effort
    if (is_on := _is_on(request)) is not None:
        options.update(dict.fromkeys(_SWITCHES, is_on))
    return options


def takes_effort(template: ChatTemplate | None) -> bool:
    """Return whether a chat template reads the effort, or a switch that the effort sets."""
    return template is not None and not _EFFORT_VARIABLES.isdisjoint(template.variables)


def asked_thinking(request: ChatRequest, template: ChatTemplate | None) -> AskedThinking:
    """Return the thinking settings of a request; raises InvalidRequestError.

    Args:
        template: the checkpoint's chat template. If the template reads the effort level, the level
            sets no budget of thinking tokens.
    """
    budget_tokens, effort = _budget(request), effort_of(request)
    given = request.chat_template_kwargs or {}
    switches = [given[name] for name in _SWITCHES if isinstance(given.get(name), bool)]
    is_on = switches[0] if switches else _is_on(request)
    # Thinking is forced only if the request switches it on or gives a budget. An effort level alone
    # forces nothing, because some clients always send one.
    must_think = is_on is True and bool(switches or budget_tokens or _is_enabled(request))
    knows_levels = template is not None and "reasoning_effort" in template.variables
    if budget_tokens is None and effort is not None and not knows_levels:
        if effort not in EFFORT_BUDGETS:
            raise InvalidRequestError(
                effort_field(request),
                f"must be one of {', '.join(EFFORT_BUDGETS)}, got {effort[:MAX_SHOWN_CHARS]!r}",
            )
        budget_tokens = EFFORT_BUDGETS[effort]
    goes_on = bool(request.continue_final_message)
    return AskedThinking(is_on is False, must_think, budget_tokens, goes_on)


def _is_enabled(request: ChatRequest) -> bool:
    switch, reasoning = request.thinking, request.reasoning
    return (switch is not None and switch.type == "enabled") or (
        reasoning is not None and reasoning.enabled is True
    )


def _budget(request: ChatRequest) -> int | None:
    """Return the budget of thinking tokens that the request gives as a number, or None.

    Raises InvalidRequestError if fields give different budgets.
    """
    given = {
        "thinking.budget_tokens": request.thinking.budget_tokens if request.thinking else None,
        "reasoning.max_tokens": request.reasoning.max_tokens if request.reasoning else None,
        "thinking_token_budget": request.thinking_token_budget,
    }
    budgets = {field: value for field, value in given.items() if value is not None}
    for field, value in budgets.items():
        check_budget(field, value)
    if len(set(budgets.values())) > 1:
        first, other, *_ = budgets
        raise InvalidRequestError(other, f"must equal {first}, got {budgets[other]}")
    return next(iter(budgets.values()), None)


def effort_of(request: ChatRequest) -> str | None:
    """Return the effort level that the request asks for, or None."""
    if request.reasoning is not None and request.reasoning.effort is not None:
        return request.reasoning.effort
    return request.reasoning_effort


def effort_field(request: ChatRequest) -> str:
    """Return the name of the request's field with the effort level, for errors."""
    of_reasoning = request.reasoning is not None and request.reasoning.effort is not None
    return "reasoning.effort" if of_reasoning else "reasoning_effort"


def _is_on(request: ChatRequest) -> bool | None:
    """Return whether the request switches thinking on (True) or off (False); None: neither."""
    if request.thinking is not None:
        return request.thinking.type != "disabled"
    if request.reasoning is not None and request.reasoning.enabled is not None:
        return request.reasoning.enabled
    effort, budget_tokens = effort_of(request), _budget(request)
    if budget_tokens is not None:
        return budget_tokens > 0
    return effort != "none" if effort is not None else None


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools offered to the model; none with ``tool_choice: "none"``."""
    return [] if request.tool_choice == "none" else request.tools or []


Grammars = Mapping[str, str]
"""Lark grammar of each custom tool's text, by tool name; empty: the tool's schema is enough."""
TEXT_ARGUMENT = "input"  # name of the only parameter of a custom tool


def parser_context(
    request: ChatRequest,
    prompt_end: str,
    grammars: Grammars | None = None,
    thinking: Thinking | None = None,
) -> ParserContext:
    """Return what the parsers of a chat's outputs need to know about the request."""
    tools = {tool.function.name: tool.function.parameters or {} for tool in offered_tools(request)}
    for name, grammar in (grammars or {}).items():
        # In every family's format, models write a custom tool's text as a JSON string
        if grammar and name in tools:
            tools[name] = {"type": "object", "properties": {TEXT_ARGUMENT: {}}}
    num_calls = sum(len(message.tool_calls or ()) for message in request.messages)
    closes_by_token = thinking is not None and thinking.closes_by_token
    return ParserContext(tools, prompt_end, num_calls, closes_by_token)


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """A constraint that a chat's tools put on its output.

    Attributes:
        output: grammar of the output.
        is_common_call: whether the grammar allows exactly one call, as a plain JSON object instead
            of the form of the model's family.
        is_either: whether the grammar allows either an answer in the response format, or calls.
        is_free: whether the grammar allows any text before calls.
    """

    output: StructuredOutput
    is_common_call: bool = False
    is_either: bool = False
    is_free: bool = False


def held_output(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars | None = None
) -> HeldOutput | None:
    """Return the constraint that a request's tools put on the output, or None.

    Raises InvalidRequestError if the request asks for a constraint that is not possible.
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
    """Return a grammar that allows calls only, or None if the request does not force calls.

    Raises InvalidRequestError if the forced tool is not among the tools.
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
    # If calls are forced, small models repeat them, so several calls are allowed only if the
    # request asks for them.
    several = request.parallel_tool_calls is True and not is_named
    grammar, is_common = parsers.forced_calls(functions, several=several)
    return HeldOutput(_grammar_of_calls(grammar), is_common_call=is_common)


def _answer_or_calls(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars
) -> HeldOutput | None:
    """Return a grammar of either calls or an answer in the response format.

    The arguments of ``strict`` functions must fit their schemas. Returns None if the request does
    not have both tools and a response format.
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
    return HeldOutput(_grammar_of_calls(grammar), is_either=True) if grammar else None


def _text_or_calls(
    request: ChatRequest, parsers: OutputParsers, grammars: Grammars
) -> HeldOutput | None:
    """Return a grammar of text with calls if a tool has a grammar or is ``strict``, else None.

    Raises InvalidRequestError if calls of ``strict`` functions cannot be constrained.
    """
    tools = offered_tools(request)
    has_grammar = any(tool.function.name in grammars for tool in tools)
    is_strict = any(one.function.strict and one.function.name not in grammars for one in tools)
    if not is_strict and (not has_grammar or asks_for_output(request)):
        return None
    functions = [_function(tool, grammars, is_held=bool(tool.function.strict)) for tool in tools]
    several = request.parallel_tool_calls is not False
    grammar = parsers.text_or_calls(functions, several=several)
    if grammar is None and is_strict:
        raise InvalidRequestError(
            "tools", "must not be strict: this model's outputs are not searched for calls"
        )
    return HeldOutput(_grammar_of_calls(grammar), is_free=True) if grammar else None


def _grammar_of_calls(grammar: str) -> StructuredOutput:
    """Return the grammar of calls as a `StructuredOutput`.

    Raises InvalidRequestError if the grammar is too large.
    """
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidRequestError(
            "tools",
            f"need a grammar of at most {MAX_TEXT_BYTES} bytes, got {num_bytes}: offer fewer "
            "functions that are strict or must be called, or smaller parameters",
        )
    return StructuredOutput(grammar=grammar)


def open_formats(request: ChatRequest, grammars: Grammars) -> list[str]:
    """Name the custom tools whose formats are described to the model, but not enforced."""
    names = (tool.function.name for tool in offered_tools(request))
    return [f"tools.{name}.format" for name in names if name in grammars]


def _function(tool: Tool, grammars: Grammars, *, is_held: bool) -> Function:
    """Convert a tool to the form that grammars of calls need; raises InvalidRequestError.

    Args:
        is_held: whether the call's arguments must fit the tool's JSON Schema.
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
    # Chat templates do not know ``developer``, OpenAI's newer name for the role ``system``.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, field)}
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


def _images_of(messages: Sequence[Message]) -> Iterator[tuple[str, ContentPart]]:
    """Yield each image of the messages with the name of its field, in order."""
    for index, message in enumerate(messages):
        if message.role == "tool" or not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if is_image(part):
                yield f"messages[{index}].content[{number}]", part


def _url_of(part: ContentPart, field: str) -> str:
    url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
    if not url:
        raise InvalidRequestError(f"{field}.image_url", "is needed")
    return url


def is_image(part: ContentPart) -> bool:
    """Return whether a part of a message is an image."""
    return part.type == "image_url"


def _content(message: Message, field: str) -> str | list[dict[str, str]]:
    """Return a message's content as one text, or as parts if the message has images."""
    parts = message.content
    if parts is None or isinstance(parts, str):
        return parts or ""
    if message.role == "tool" or not any(map(is_image, parts)):
        return _text(message.role, parts, field)
    if message.role != "user":
        raise InvalidRequestError(
            f"{field}.content", f"must not have images in a message of the role {message.role}"
        )
    return [
        {"type": "image"}
        if is_image(part)
        else {"type": "text", "text": _text(message.role, [part], field, number)}
        for number, part in enumerate(parts)
    ]


def _text(role: str, parts: Sequence[ContentPart], field: str, first: int = 0) -> str:
    """Join the texts of a message's parts.

    Args:
        first: index of ``parts[0]`` in the message, for errors.
    """
    texts = []
    for i, part in enumerate(parts, first):
        shown = part.type[:MAX_SHOWN_CHARS]
        if role == "tool" and part.type != "text":
            texts.append(f"[{shown}: not shown, because you read text only]")
        elif part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{field}.content[{i}]",
                f"must be of type text with a text, or image_url, got {shown!r}",
            )
        else:
            texts.append(part.text)
    return "\n".join(texts)


def unseen_results(request: ChatRequest) -> list[str]:
    """Name the kinds of parts, such as images, in tool results that the model does not see.

    Such a part is no error: an agent sends the result again with each later request, so an error
    would end the conversation. Instead, the model is told that a part is not shown.
    """
    contents = (message.content for message in request.messages if message.role == "tool")
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sorted({f"messages.tool.{part.type}" for part in parts if part.type != "text"})


def _without_none(tool: Tool) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(tool)
    built["function"] = {k: v for k, v in built["function"].items() if v is not None}
    return built
