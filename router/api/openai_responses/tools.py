"""Convert tools of the Responses API to functions that a chat can offer to the model.

function   -> a function
custom     -> a function with one text parameter, ``input``. A regex becomes the text's pattern; a
              Lark grammar constrains the text when the model calls the tool
namespace  -> the functions in it, each named after the namespace and the function
all others -> dropped: OpenAI runs them, or only clients for certain models use them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.api.errors import InvalidRequestError
from router.api.http.conversation import TEXT_ARGUMENT
from router.api.http.schema import Function, Tool

INPUT = TEXT_ARGUMENT  # name of the only parameter of a custom tool's function
_BETWEEN = "__"  # stands between the namespace and the function's name


class ToolFormat(msgspec.Struct):
    """The form of a custom tool's input: any text, or text that fits a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct):
    """A tool that the model may call; its type decides which fields are present.

    Attributes:
        format: form of a custom tool's input; None: any text.
        tools: the tools in a namespace.
    """

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list[ResponsesTool] | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """A request's tools as functions of a chat, and how to convert their calls back.

    Attributes:
        tools: the functions that the chat offers; None: the request has no tools.
        custom: names of custom tools.
        grammars: Lark grammars of custom tools' texts, by tool name; "": only the pattern
            constrains the text.
        namespaces: namespace and own name of a function, by the name that the model sees.
        dropped: names of the dropped tools, for the response header.
    """

    tools: list[Tool] | None = None
    custom: frozenset[str] = frozenset()
    grammars: Mapping[str, str] = field(default_factory=dict)
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    dropped: Sequence[str] = ()

    def told_as(self, name: str, namespace: str | None) -> str:
        """Return the name that the model sees for a function in a namespace."""
        return f"{namespace}{_BETWEEN}{name}" if namespace else name


def read_tools(given: Sequence[ResponsesTool] | None) -> OfferedTools:
    """Convert a request's tools to functions for a chat; raises InvalidRequestError."""
    if given is None:
        return OfferedTools()
    tools: list[Tool] = []
    custom: set[str] = set()
    grammars: dict[str, str] = {}
    namespaces: dict[str, tuple[str, str]] = {}
    dropped: list[str] = []
    for where, tool, namespace in _each(given):
        if tool.type not in ("function", "custom"):
            dropped.append(f"tools.{tool.type}")
            continue
        if not tool.name:
            raise InvalidRequestError(f"{where}.name", "is needed")
        name = tool.name
        if namespace:
            name = OfferedTools().told_as(name, namespace)
            namespaces[name] = (namespace, tool.name)
        parameters, strict = tool.parameters, tool.strict
        if tool.type == "custom":
            custom.add(name)
            parameters, strict = _parameters_of(tool.format, where), None
            if tool.format is not None and tool.format.type == "grammar":
                strict = True
                is_lark = tool.format.syntax == "lark"
                grammars[name] = str(tool.format.definition) if is_lark else ""
        tools.append(Tool("function", Function(name, _description(tool), parameters, strict)))
    return OfferedTools(tools, frozenset(custom), grammars, namespaces, dropped)


def _each(given: Sequence[ResponsesTool]) -> list[tuple[str, ResponsesTool, str]]:
    """List each tool with its field in the request, for errors, and its namespace."""
    found: list[tuple[str, ResponsesTool, str]] = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.type != "namespace":
            found.append((where, tool, ""))
            continue
        for number, inner in enumerate(tool.tools or ()):
            found.append((f"{where}.tools[{number}]", inner, tool.name))
    return found


def _parameters_of(form: ToolFormat | None, where: str) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if form is not None and form.type == "grammar":
        if not form.definition or form.syntax not in ("lark", "regex"):
            raise InvalidRequestError(f"{where}.format", "needs a text and a syntax (lark, regex)")
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _description(tool: ResponsesTool) -> str | None:
    """Describe a tool; a custom tool's description includes its grammar."""
    form = tool.format if tool.type == "custom" else None
    if form is None or not form.definition:
        return tool.description
    told = f"The input is a text of this grammar ({form.syntax}):\n{form.definition}"
    return f"{tool.description}\n{told}" if tool.description else told
