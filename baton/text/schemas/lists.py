"""Schema lists: writes out the lists that `uniqueItems` and `contains` allow.

The grammar library counts items but does not compare them. Lists of a few given values are written
out in every order. For `contains`, one list is written for each place of the contained item.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from baton.text.schemas.references import ANNOTATIONS, Schema, is_of, resolved

MAX_LISTED = 5  # maximum number of values of a list whose items must differ
_MAX_LISTS = 400  # maximum number of lists to write out; five values give 326 ordered lists
_MAX_CHARS = 20_000
# In a list without a maximum length, the contained item must be among this many first items.
MAX_PLACES = 8


def written_out(schema: Schema, root: Schema) -> Schema:
    """Return a schema whose ``uniqueItems`` and ``contains`` are written out as far as possible.

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
    """Return the values that a schema lists, each once; None if others are possible."""
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
