"""Unit tests of schema rewrites: ordinary types are taken, and what they say is enforced."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, make_grammar
from baton.text.schemas.repairs import enforceable_schema
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
LIBRARY = load_grammar_tokenizer(DEMO_MODEL / "tokenizer.json", [4095])


def matcher_of(schema: Any) -> LLMatcher:
    output = StructuredOutput(json_schema=schema)
    return compile_grammar(output, make_grammar(output), LIBRARY)


def fits(schema: Any, value: Any) -> bool:
    matcher, token_ids = matcher_of(schema), TOKENIZER.encode(json.dumps(value))
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def record(names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "propertyNames": names, "additionalProperties": more or True}


def tagged(tag: str, **properties: Any) -> dict[str, Any]:
    """Make an object as pydantic writes one whose tag has a default."""
    kind = {"const": tag, "default": tag, "type": "string"}
    names = sorted(properties)
    return {"type": "object", "properties": {"kind": kind, **properties}, "required": names}


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
COLOR = {"$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}}}
A, B = tagged("a", x=INTEGER), tagged("b", y={"type": "string"})
UNION = {"oneOf": [A, B], "discriminator": {"propertyName": "kind"}}
BY_REFERENCE = {
    "$defs": {"A": A, "B": B},
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}},
}
OF_A, OF_B = {"kind": "a", "x": 1}, {"kind": "b", "y": "z"}
UUID4 = "0b8f6a0e-1c2d-4e3f-8a9b-0c1d2e3f4a5b"
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("z.record(z.string(), z.number())", record(string(), **NUMBER), [{"a": 1}, {}], [{"a": "b"}]),
    ("names of no type", record({}, **NUMBER), [{"a": 1}], [{"a": "b"}]),
    ("names with a title", record({"title": "N", **string()}), [{"a": "b"}], []),
    ("z.record(z.enum())", record({"enum": ["a", "b"]}, **NUMBER), [{"a": 1}], [{"c": 1}]),
    (
        "dict[Color, int]",
        {**record({"$ref": "#/$defs/Color"}, **INTEGER), **COLOR},
        [{"red": 1}],
        [{"green": 1}, {"red": "x"}],
    ),
    ("names by a pattern", record({"pattern": "^a+$"}, **INTEGER), [{"aa": 1}], [{"b": 1}]),
    ("names of a length", record({"minLength": 2}, **INTEGER), [{"ab": 1}, {}], [{"a": 1}]),
    ("SecretStr", string(format="password", writeOnly=True), ["a"], [1]),
    ("bytes", string(format="binary"), ["a"], []),
    ("Path", string(format="path"), ["/a b"], []),
    ("FilePath", string(format="file-path"), ["/a b"], []),
    ("Base64Bytes", string(format="base64"), ["", "YQ==", "YWI="], ["a", "YQ", "%"]),
    ("z.base64url()", string(format="base64url"), ["YQ", "a-_"], ["a+b", "%"]),
    (
        "z.base64url() with its pattern",
        string(format="base64url", contentEncoding="base64url", pattern="^[A-Za-z0-9_-]*$"),
        ["YQ"],
        ["%"],
    ),
    ("z.number().multipleOf(5)", {**NUMBER, "multipleOf": 5, "minimum": 0}, [0, 5, 95], [7, 5.5]),
    ("number or null, of a step", {"type": ["number", "null"], "multipleOf": 2}, [4, None], [3]),
    ("date", string(format="date"), ["2024-02-29", "2000-02-29", "1999-12-31"],
     ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-1-1"]),
    ("email", string(format="email"),
     ["a@b.com", "first.m.last@mail.example.org", "x" * 31 + "@b.c-d.de"],
     ["a@b", "a..b@c.de", "x" * 65 + "@b.com", "a@-b.com"]),
    ("time", string(format="time"), ["23:59:59Z", "00:00:00.5+01:30"],
     ["10:00:60Z", "24:00:00Z", "10:00:00", "10:00:00z"]),
    ("datetime", string(format="date-time"), ["2024-02-29T00:00:00Z"],
     ["2023-02-29T00:00:00Z", "2024-02-29T00:00:60Z", "2024-02-29t00:00:00Z"]),
    ("UUID4", string(format="uuid4"), [UUID4], [UUID4.replace("4e3f", "1e3f"), "x"]),
    ("IPv4Network", string(format="ipv4network"), ["10.0.0.0/8"], ["10.0.0.0", "10.0.0.0/33"]),
    ("IPvAnyAddress", string(format="ipvanyaddress"), ["10.0.0.1"], ["10.0.0.256"]),
    ("NameEmail", string(format="name-email"), ["a@b.com"], ["a"]),
    ("PostgresDsn", string(format="multi-host-uri", minLength=1), ["postgres://a:1/b"], [" "]),
    ("a union by a tag", UNION, [OF_A, OF_B], [{"x": 1}, {"kind": "c"}, {"kind": "a", "y": "z"}]),
    ("a union of references", BY_REFERENCE, [OF_A, OF_B], [{"x": 1}]),
    ("a union by a tag that is not named", {"oneOf": [A, B]}, [OF_A, OF_B], [{"x": 1}]),
    ("a list of unlike items that has one", {"type": "array", "items": INTEGER, "maxItems": 1,
     "uniqueItems": True}, [[1], []], [[1, 2]]),
    ("z.strictObject()", {"type": "object", "properties": {"a": INTEGER},
     "unevaluatedProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    ("z.never()", {"type": "object", "properties": {"a": INTEGER, "b": {"not": {}}}},
     [{"a": 1}], [{"a": 1, "b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("is_within", [False, True])
def test_schemas_of_ordinary_types_are_enforced(
    schema: Any, good: list[Any], bad: list[Any], is_within: bool
) -> None:
    """Regression: enforceable schemas were refused."""
    if is_within and "$defs" not in schema:
        schema = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        good, bad = ([{"v": value} for value in values] for values in (good, bad))
    assert [value for value in good if not fits(schema, value)] == []
    assert [value for value in bad if fits(schema, value)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": INTEGER, "uniqueItems": True},
        record({"pattern": "a", "minLength": 2}),
        string(format="regex"),
        string(pattern="^(?!a)b$"),
        {"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
        {"not": {}},
        {"type": "object", "properties": 5},
        {"oneOf": [{**A, "required": 5}, B]},
        {"type": "string", "format": "base64", "pattern": "a", "allOf": 5},
    ],
)
def test_what_cannot_be_enforced_is_one_line(schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        matcher_of(schema)
    assert caught.value.field == "structured_output.json_schema"
    assert "\n" not in str(caught.value)


def decimal(rest: str) -> str:
    """Make a pattern as pydantic does for a Decimal."""
    return rf"^(?!^[-+.]*$)[+-]?0*{rest}"


def limited(whole: str, length: int, number: str) -> str:
    return rf"(?:{whole}|(?=[\d.]{{1,{length}}}0*$){number}0*$)"


DECIMALS = [
    decimal(r"\d*\.?\d*$"),
    decimal(r"\d*\.?\d{0,2}0*$"),
    decimal(limited(r"\d{0,3}", 6, r"\d{0,3}\.\d{0,2}")),
    decimal(limited(r"\d{0,0}", 2, r"\d{0,0}\.\d{0,3}")),
    decimal(limited(r"\d{0,3}", 4, r"\d*\.\d*")),
]
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
    r"(\d+([.,]\d+)?S)?)?)$"
)


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [*((one, "0012.5+-") for one in DECIMALS), (EMAIL, "a.b@c-.co'"), (DURATION, "PT1W2YMDHS.,")],
)
def test_patterns_with_look_around_have_equals_without(pattern: str, letters: str) -> None:
    """(Pydantic leaves a limited Decimal open at its end: no more than digits may come there.)"""
    new = json.loads(enforceable_schema(json.dumps(string(pattern=pattern))))
    patterns = [new["pattern"], *(one["pattern"] for one in new.get("allOf", ()))]
    assert not any("(?!" in one or "(?=" in one for one in patterns)
    assert not matcher_of(string(pattern=pattern)).get_error()
    closed = pattern if pattern.endswith("$") else f"{pattern}$"
    rng, num_matched = random.Random(pattern), 0
    for _ in range(30_000):
        text = "".join(rng.choices(letters, k=rng.randint(0, 7)))
        if "@" in letters:
            text = f"{text}@{''.join(rng.choices(letters, k=3))}.com"
        if "P" in letters:
            text = f"P{text}"
        old = re.search(closed, text, re.ASCII) is not None
        assert all(re.search(one, text, re.ASCII) for one in patterns) is old, text
        num_matched += old
    assert num_matched > 20
