"""Schema lists: `uniqueItems` and `contains`, as lists that are written out.

The grammar library counts items, but compares none. Lists of a few listed values are written out
in every order. A list that has an item of a kind is written for each place of this item.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from baton.text.schemas.references import ANNOTATIONS, Schema, is_of, resolved

MAX_LISTED = 5  # values of a list whose items are all different
_MAX_LISTS = 400  # all orders of all choices of five values are 326
_MAX_CHARS = 20_000
# In a list without a maximum length, a contained item is among this many first items.
MAX_PLACES = 8


def written_out(schema: Schema, root: Schema) -> Schema:
    """Return a schema of lists without ``uniqueItems`` and ``contains``, where that can be written.

    Args:
        root: the whole schema, to which references point.
    """
    return _contains(_unique(dict(schema), root))


def _unique(schema: Schema, root: Schema) -> Schema:
    most, least = schema.get("maxItems"), schema.get("minItems", 0)
    if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
        schema.pop("uniqueItems", None)
    if schema.get("uniqueItems") is not True or schema.get("type") != "array":
        return schema
    if "prefixItems" in schema or isinstance(schema.get("items"), list):
        return schema
    values = _listed(schema.get("items"), root)
    if values is None:
        return schema
    most = min(len(values), most) if isinstance(most, int) else len(values)
    sizes = range(least, most + 1)
    num_lists = sum(math.perm(len(values), size) for size in sizes)
    if num_lists > _MAX_LISTS or num_lists * len(json.dumps(values)) > _MAX_CHARS:
        return schema
    lists = [list(one) for size in sizes for one in itertools.permutations(values, size)]
    left = {key: value for key, value in schema.items() if key not in _OF_ITEMS}
    return {**left, "enum": lists} if lists else {**left, "allOf": [False]}


_OF_ITEMS = frozenset({"uniqueItems", "items", "minItems", "maxItems"})


def _listed(schema: Any, root: Schema) -> list[Any] | None:
    """Return the values that a schema lists, each once; None if there are others."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    said = set(schema) - ANNOTATIONS
    if said <= {"const", "enum", "type"} and ("const" in said or "enum" in said):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type")
        if kinds is not None:
            kinds = [kinds] if isinstance(kinds, str) else kinds
            values = [value for value in values if any(is_of(value, kind) for kind in kinds)]
        return [json.loads(one) for one in dict.fromkeys(map(json.dumps, values))]
    if said == {"type"} and schema["type"] == "boolean":
        return [False, True]
    return None


def _contains(schema: Schema) -> Schema:
    least = schema.get("minContains", 1)
    if "contains" not in schema or "maxContains" in schema or least not in (0, 1):
        return schema
    if "prefixItems" in schema or isinstance(schema.get("items"), list):
        return schema
    if schema.get("type") != "array":
        return schema
    found = dict(schema)
    wanted = found.pop("contains")
    found.pop("minContains", None)
    if least == 0:
        return found
    most, fewest = found.get("maxItems", MAX_PLACES), found.get("minItems", 0)
    items = found.get("items", True)
    if not isinstance(most, int) or most > 2 * MAX_PLACES:
        most = MAX_PLACES
    ways = [
        {
            "prefixItems": [*[items] * place, {"allOf": [items, wanted]}],
            "minItems": max(fewest, place + 1),
        }
        for place in range(most)
    ]
    return {**found, "allOf": [*found.get("allOf", ()), {"anyOf": ways} if ways else False]}
