"""Schema rewrites: express pydantic's and zod's schemas in keywords that the library supports.

A rewritten schema accepts at most the values that the original schema accepts. A keyword that
cannot be rewritten stays in the schema, and the request is refused with the keyword's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from baton.text.schemas.conditions import without_conditions
from baton.text.schemas.lists import written_out
from baton.text.schemas.references import ANNOTATIONS, Schema, resolved

# Formats that tell a text's meaning or display, and do not limit the text.
_NO_CONSTRAINT = {
    "password", "binary", "path", "file-path", "directory-path", "text", "textarea", "multiline",
    "markdown", "html", "int32", "int64", "float", "double", "decimal",
}  # fmt: skip
# Format -> format to use instead, which allows the same texts or fewer.
_NARROWER = {
    "idn-email": "email",
    "name-email": "email",
    "iri": "uri",
    "multi-host-uri": "uri",
    "idn-hostname": "hostname",
}
_HEX = "[0-9a-fA-F]"
_IPV4 = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NETWORK = rf"^{_IPV4}(\.{_IPV4}){{3}}/(3[0-2]|[12]?[0-9])$"
_BASE64 = "[A-Za-z0-9{}]"
_BASE64_END = "({one}{{2}}==|{one}{{3}}=)?"


def _base64_pattern(more: str) -> str:
    one = _BASE64.format(more)
    return f"^({one}{{4}})*{_BASE64_END.format(one=one)}$"


def _uuid_pattern(version: str) -> str:
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"


_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_MONTH_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_OF_FOUR = "(0[48]|[2468][048]|[13579][26])"  # two digits: the multiples of 4, except 00
_DAY = f"({_YEAR}-{_MONTH_DAY}|([0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)-02-29)"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
# Leap seconds are not allowed, because only some days have a leap second.
_CLOCK = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR})"

_ATOM = "[A-Za-z0-9_+\\-]"
# At most 64 characters precede the @, because mail servers accept no more.
_MAILBOX = rf"({_ATOM}{{1,31}}(\.{_ATOM}{{1,31}})?|{_ATOM}{{1,15}}(\.{_ATOM}{{1,15}}){{1,3}})"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"

# Format -> pattern. The patterns of networks only allow addresses that are not abbreviated.
_PATTERNS = {
    "date": f"^{_DAY}$",
    "time": f"^{_CLOCK}$",
    "date-time": f"^{_DAY}T{_CLOCK}$",
    "email": rf"^{_MAILBOX}@({_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}$",
    "base64": _base64_pattern("+/"),
    "byte": _base64_pattern("+/"),
    "base64url": "^[A-Za-z0-9_-]*$",
    "cidrv4": _NETWORK,
    "ipv4network": _NETWORK,
    "ipv4interface": _NETWORK,
    "ipvanynetwork": _NETWORK,
    "ipvanyinterface": _NETWORK,
    "ipvanyaddress": rf"^{_IPV4}(\.{_IPV4}){{3}}$",
    "cuid": "^[cC][0-9a-z]{24}$",
    "cuid2": "^[a-z][0-9a-z]{23}$",
    "e164": "^[+][1-9][0-9]{6,14}$",
    "guid": f"^{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
    "json-pointer": "^(/([^~/]|~[01])*)*$",
    "jwt": r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+$",
    "ksuid": "^[A-Za-z0-9]{27}$",
    "mac": f"^{_HEX}{{2}}(:{_HEX}{{2}}){{5}}$",
    "nanoid": "^[a-zA-Z0-9_-]{21}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$",
    "xid": "^[0-9a-v]{20}$",
    **{f"uuid{version}": _uuid_pattern(str(version)) for version in range(1, 9)},
}
_SECONDS = "[0-9]+([.,][0-9]+)?S"
_TIME = f"T([0-9]+H([0-9]+M)?({_SECONDS})?|[0-9]+M({_SECONDS})?|{_SECONDS})"
_DATE = "([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
# Patterns of zod with look-around -> patterns without look-around that match the same texts, except
# that host names have at most three labels.
_EQUAL = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$": r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
    r"(\d+([.,]\d+)?S)?)?)$": f"^P([0-9]+W|{_DATE}({_TIME})?|{_TIME})$",
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:"
    r"[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": r"^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?){0,2}\.?$",
}
# Pydantic's pattern of a Decimal; its named groups are the maximum numbers of digits.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?:"
    r"(?P<free>\\d\*\\\.\?\\d\*\$)"
    r"|\\d\*\\\.\?\\d\{0,(?P<places>\d+)\}0\*\$"
    r"|\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<both>\d+)\}0\*\$\)\\d\{0,\d+\}\\\."
    r"\\d\{0,(?P<part>\d+)\}0\*\$\)"
    r"|\(\?:\\d\{0,(?P<digits>\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\*\\\.\\d\*0\*\$\))"
)
_MAX_DIGITS = 64


def rewritten(schema: Schema, root: Schema, beside: Schema | None = None) -> Schema | bool:
    """Rewrite the keywords of one schema, but not those of schemas inside it.

    Args:
        root: the whole schema, into which `$ref`s point.
        beside: types and properties that enclosing schemas require of the same value.
    """
    if schema.get("not") in ({}, True):
        return False
    schema = written_out(without_conditions(schema, root, beside or {}), root)
    for rewrite in (_multiple, _format, _pattern, _names, _unevaluated, _alternatives):
        rewrite(schema, root)
    return schema


def _multiple(schema: Schema, root: Schema) -> None:
    """Require integers if values must be multiples of a whole number.

    The library panics if a special token follows a multiple of a whole number, even if the schema
    has the whole number as ``95.0``.
    """
    step, kind = schema.get("multipleOf"), schema.get("type")
    if isinstance(step, bool) or not isinstance(step, int | float) or step != step // 1:
        return
    if kind == "number":
        schema["type"] = "integer"
    elif isinstance(kind, list) and "number" in kind:
        schema["type"] = sorted({*kind, "integer"} - {"number"})


def _format(schema: Schema, root: Schema) -> None:
    kind = schema.get("format")
    if not isinstance(kind, str) or schema.get("type", "string") != "string":
        return
    kind = _NARROWER.get(kind, kind)
    schema["format"] = kind
    if kind in _NO_CONSTRAINT:
        del schema["format"]
    elif kind in _PATTERNS:
        del schema["format"]
        if "pattern" in schema:  # zod writes format and pattern; both must hold
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": _PATTERNS[kind]}]
        else:
            schema["pattern"] = _PATTERNS[kind]


def _pattern(schema: Schema, root: Schema) -> None:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    if pattern in _EQUAL:
        schema["pattern"] = _EQUAL[pattern]
    elif (found := _DECIMAL.fullmatch(pattern)) and (numbers := _decimal(found.groupdict())):
        # The text must have a digit, as the original pattern's look-ahead demanded.
        schema["pattern"] = f"^[+-]?{numbers}$"
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": "[0-9]"}]


def _decimal(limits: Mapping[str, str | None]) -> str:
    """Return a pattern of unsigned decimal numbers with limited numbers of digits.

    Args:
        limits: groups of a match of `_DECIMAL`.

    Returns an empty text if a limit is above `_MAX_DIGITS`.
    """
    given = {name: int(value) for name, value in limits.items() if value and value.isdigit()}
    if max(given.values(), default=0) > _MAX_DIGITS:
        return ""
    if "places" in given:
        return rf"[0-9]*\.?[0-9]{{0,{given['places']}}}0*"
    if "whole" in given:
        part = min(given["part"], given["both"] - 1 - given["whole"])
        return rf"0*[0-9]{{0,{given['whole']}}}(\.[0-9]{{0,{part}}}0*)?"
    if "digits" in given:
        most = given["digits"]
        ways = [rf"[0-9]{{0,{k}}}\.[0-9]{{0,{most - k}}}0*" for k in range(most + 1)]
        return "0*(" + "|".join([f"[0-9]{{0,{most}}}", *ways]) + ")"
    return r"([0-9]+\.?[0-9]*|\.[0-9]+)"


def _names(schema: Schema, root: Schema) -> None:
    """Replace ``propertyNames`` by properties or a pattern of names, if possible."""
    names = resolved(schema.get("propertyNames"), root)
    if names is None or names is True:
        schema.pop("propertyNames", None)
        return
    if not isinstance(names, Mapping):
        return
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    if said.pop("type", "string") != "string":
        return
    listed = [said["const"]] if "const" in said else said.get("enum")
    values = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    if not said:
        del schema["propertyNames"]
    elif len(said) == 1 and isinstance(listed, list) and "patternProperties" not in schema:
        known = [name for name in listed if isinstance(name, str)]
        schema["properties"] = {name: properties.get(name, values) for name in known}
        schema["additionalProperties"] = False
        del schema["propertyNames"]
    elif not properties and "patternProperties" not in schema:
        pattern = _name_pattern(said)
        if pattern is not None:
            schema["patternProperties"] = {pattern: values}
            schema["additionalProperties"] = False
            del schema["propertyNames"]


def _name_pattern(said: Mapping[str, Any]) -> str | None:
    """Return a pattern for the names that a schema of names allows; None: unknown keywords."""
    if set(said) == {"pattern"}:
        return str(said["pattern"])
    if set(said) == {"format"}:
        return _PATTERNS.get(str(said["format"]))
    low, high = said.get("minLength", 0), said.get("maxLength", "")
    if set(said) <= {"minLength", "maxLength"} and isinstance(low, int):
        return rf"^(?s:.{{{low},{high}}})$"
    return None


def _unevaluated(schema: Schema, root: Schema) -> None:
    """Rewrite ``unevaluatedProperties`` if no other keyword has schemas that name properties."""
    others = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef"}
    if "unevaluatedProperties" in schema and others.isdisjoint(schema):
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))


def _alternatives(schema: Schema, root: Schema) -> None:
    """Make the tag of alternatives a required property.

    A tag is a property whose listed values differ between all alternatives. Schema generators make
    a tag optional if it has a default.
    """
    ways = schema.get("oneOf")
    if not isinstance(ways, list) or len(ways) < 2:
        return
    named = schema.get("discriminator")
    tag = named.get("propertyName") if isinstance(named, Mapping) else None
    tags = [_tags(way, root) for way in ways]
    for name in [tag] if isinstance(tag, str) else tags[0]:
        values = [found.get(name) for found in tags]
        if None in values or not _are_apart(value for value in values if value is not None):
            continue
        schema["oneOf"] = [
            {**way, "required": sorted({*way.get("required", ()), *_required(way, root), name})}
            for way in ways
        ]
        return


def _tags(way: Any, root: Schema) -> dict[str, frozenset[str]]:
    """Return the values that an alternative lists for each property."""
    found = resolved(way, root)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    tags = {}
    for name, declared in properties.items():
        one = resolved(declared, root)
        if not isinstance(one, Mapping):
            continue
        listed = [one["const"]] if "const" in one else one.get("enum")
        if isinstance(listed, list):
            tags[name] = frozenset(json.dumps(value) for value in listed)
    return tags


def _required(way: Any, root: Schema) -> list[str]:
    found = resolved(way, root)
    return [name for name in found.get("required", ()) if isinstance(name, str)]


def _are_apart(sets: Iterable[frozenset[str]]) -> bool:
    seen: set[str] = set()
    for one in sets:
        if not seen.isdisjoint(one):
            return False
        seen |= one
    return True
