"""Follow references in a JSON schema; list keywords that describe a value but do not limit it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
     "writeOnly"}
)  # fmt: skip


def resolved(schema: Any, root: Schema) -> Any:
    """Return a schema, or if it is a `$ref` into the whole schema, the schema that it refers to.

    References to references are followed, up to a limit.
    """
    for _ in range(8):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        path = schema["$ref"]
        if not path.startswith("#/"):
            break
        steps = (step.replace("~1", "/").replace("~0", "~") for step in path[2:].split("/"))
        schema = functools.reduce(_step, steps, root)
    return schema


def _step(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, Mapping) else None


def is_of(value: Any, kind: str) -> bool:
    """Return whether a value has the type that JSON Schema calls ``kind``."""
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "object":
            return isinstance(value, Mapping)
        case _:
            return isinstance(value, list)
