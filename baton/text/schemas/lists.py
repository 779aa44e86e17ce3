"""Schema lists: replaces `uniqueItems` and `contains` by the lists that they allow.

The grammar library counts the items of a list but does not compare them. For `uniqueItems`, all
lists of a few given values are written out, in every order. For `contains`, an alternative is
written for each place that the contained item may have.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from baton.text.schemas.references import ANNOTATIONS, Schema, is_of, resolved

MAX_LISTED = 5  # maximum number of different values in a list with uniqueItems
_MAX_LISTS = 400  # maximum number of lists to write out; five values give 326 ordered lists
_MAX_CHARS = 20_000
# If a list has no maximum length, the item that it must contain is among this many first items.
MAX_PLACES = 8


def written_out(schema: Schema, root: Schema) -> Schema:
    """Return the schema with ``uniqueItems`` and ``contains`` replaced as far as possible.

    Args:
        root: the whole schema, into which references point.
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
    """Return the values that a schema lists, each once; None if the schema allows other values."""
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
