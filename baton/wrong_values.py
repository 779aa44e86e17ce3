"""Errors of msgspec in plain words: the field, the types that it may have, the values it may have.

msgspec says "Expected `int | null`, got `str` - at `$.n`". Here the field is `n`, and the problem
is "must be an integer or null, got a string".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_PATH = re.compile(r" - at (`key` in )?`\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`(?:, got `([^`]*)`)?(.*)")
_STEP = re.compile(r"[^.\[\]]+|\[\d*\]|\[\.\.\.\]")
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


def field_and_problem(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """Return the path of the wrong field, such as `messages[0].role`, and what is wrong with it.

    The path is empty if the value as a whole is wrong.

    Args:
        kind: type of the value that was read.
    """
    message = str(error)
    found = _PATH.search(message)
    path = found[2] if found else ""
    is_key = found is not None and bool(found[1])
    problem = message[: found.start()] if found else message
    for pattern, said in ((_MISSING, "is needed"), (_UNKNOWN, "is not a known field")):
        if inner := pattern.search(problem):
            return (f"{path}.{inner[1]}" if path else inner[1]), said
    return path, _in_plain_words(problem, path, kind, is_key=is_key)


def _in_plain_words(problem: str, path: str, kind: Any, *, is_key: bool) -> str:
    if expected := _EXPECTED.fullmatch(problem):
        wanted, got, limit = expected.groups()
        subject = "must have keys that are" if is_key else "must be"
        return f"{subject} {_either(wanted)}{limit}{_got(wanted, got)}"
    if problem.startswith("Invalid enum value") and (choices := list(_choices(kind, path))):
        return f"must be {_joined(choices)}, got {problem.removeprefix('Invalid enum value ')}"
    return f"{problem[:1].lower()}{problem[1:]}"


def _either(types: str) -> str:
    return _joined([_WORDS.get(one, one) for one in types.split(" | ")])


def _got(wanted: str, got: str | None) -> str:
    if got is None:
        return ""
    if got == "float" and "int" in wanted.split(" | "):
        return ", got a number that is not an integer"
    return f", got {_WORDS.get(got, got)}"


def _joined(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _choices(kind: Any, path: str) -> Iterator[str]:
    """Yield the texts that the field at a path may have; none if the field is no choice."""
    nodes = list(_parts(inspect.type_info(kind)))
    for step in _STEP.findall(path):
        nodes = [part for node in nodes for inner in _inside(node, step) for part in _parts(inner)]
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            yield from (one if isinstance(one, str) else json.dumps(one) for one in node.values)
        elif isinstance(node, inspect.EnumType):
            yield from (str(one.value) for one in node.cls)


def _parts(node: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types that a type joins; the type itself if it is no union."""
    yield from node.types if isinstance(node, inspect.UnionType) else (node,)


def _inside(node: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types of a field, or of the values of a list or an object."""
    if isinstance(node, inspect.StructType):
        yield from (one.type for one in node.fields if one.encode_name == step)
    elif isinstance(node, inspect.ListType | inspect.VarTupleType) and step.startswith("["):
        yield node.item_type
    elif isinstance(node, inspect.DictType):
        yield node.value_type
