"""Property tests: every output that its grammar lets end matches the requested structure.

Outputs are drawn at random from the tokens that the matcher allows: a model cannot be worse.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from baton.api.errors import InvalidRequestError
from baton.api.structured_output import StructuredOutput
from baton.text.grammars import compile_grammar, load_grammar_tokenizer, make_grammar
from baton.text.schemas.repairs import repair_pattern
from baton.text.tokenizer import Tokenizer
from tests.fakes.answers.structured_cases import make_cases, make_schema
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.property.num_examples import num_examples

TOKENIZER = Tokenizer(DEMO_MODEL)
GRAMMAR_TOKENIZER = load_grammar_tokenizer(DEMO_MODEL / "tokenizer.json", [4095])
CLASSES = (
    r'[^"]', r"[^\\]", r'[^"\\]', r"[^a]", r"[a-f]", r"[^\W]", r"[\s\S]", ".", r'[^"\n]', r"\S",
    r"[ !#-~]", r"[^\x22]", r"[^!-/]", r"[\n\t]", r"\d", r'["\\]', r"[^]a]", r'[^"a-z]',
)  # fmt: skip


def make_pattern(rng: random.Random) -> str:
    parts = [
        rng.choice(CLASSES) + rng.choice(("", "{1,3}", "?", "{2}"))
        for _ in range(rng.randint(1, 3))
    ]
    return f"^(?:{'|'.join((''.join(parts), rng.choice(CLASSES)))})$"


def make_open_schema(rng: random.Random) -> dict[str, Any]:
    """Make a schema with open property names and string patterns, where most faults were."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    value = rng.choice(({"type": "boolean"}, {"type": "string", "pattern": make_pattern(rng)}))
    names = rng.sample(("a", "b", "id"), rng.randint(0, 2))
    schema["properties"] = dict.fromkeys(names, value)
    schema["required"] = [name for name in names if rng.random() < 0.5]
    if rng.random() < 0.6:
        schema["patternProperties"] = {rng.choice(("^[a-c]$", '^[^"]{1,2}$', "^x")): value}
    elif rng.random() < 0.5:
        schema["additionalProperties"] = value
    if rng.random() < 0.6:
        schema["minProperties"] = rng.randint(1, 3)
    if rng.random() < 0.5:
        schema["maxProperties"] = 3
    return schema


def draw_output(matcher: LLMatcher, rng: random.Random, max_tokens: int) -> str | None:
    """A text that ends where it may end; None if none did."""
    token_ids: list[int] = []
    for _ in range(max_tokens):
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.4):
            return TOKENIZER.decode(token_ids)
        bits = matcher.compute_bitmask()
        allowed = [
            8 * index + bit
            for index, byte in enumerate(bits)
            if byte
            for bit in range(8)
            if byte >> bit & 1 and 8 * index + bit < 4093
        ]
        if not allowed:
            return TOKENIZER.decode(token_ids) if matcher.is_accepting() else None
        token_id = rng.choice(allowed)
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
    return None


def draw(structured_output: StructuredOutput, rng: random.Random) -> list[str]:
    grammar = make_grammar(structured_output)
    outputs = []
    for _ in range(4):
        matcher = compile_grammar(structured_output, grammar, GRAMMAR_TOKENIZER)
        outputs.append(draw_output(matcher, rng, 60))
    return [output for output in outputs if output is not None]


def test_every_output_of_a_schema_fits_it() -> None:
    rng, num_drawn = random.Random("schemas"), 0
    for index in range(num_examples(60)):
        schema = make_schema(rng, 2) if index % 3 == 0 else make_open_schema(rng)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            outputs = draw(StructuredOutput(json_schema=schema), rng)
        except InvalidRequestError:  # what cannot be enforced is refused
            continue
        for output in outputs:
            num_drawn += 1
            assert validator.is_valid(json.loads(output)), (schema, output)
    assert num_drawn > num_examples(60)


def test_every_output_of_a_pattern_fits_it() -> None:
    rng, num_drawn = random.Random("patterns"), 0
    for _ in range(num_examples(60)):
        pattern = make_pattern(rng)
        for output in draw(
            StructuredOutput(json_schema={"type": "string", "pattern": pattern}), rng
        ):
            num_drawn += 1
            assert re.search(pattern, json.loads(output)), (pattern, output)
    assert num_drawn > num_examples(60)


def test_every_output_of_a_regex_a_grammar_or_a_choice_fits_it() -> None:
    rng = random.Random("cases")
    for case in make_cases(num_examples(60), seed=5):
        assert case.params.structured_output is not None
        for output in draw(case.params.structured_output, rng):
            assert case.is_valid(output), (case.params.structured_output, output)


@pytest.mark.parametrize("schema", [
    {"type": "object", "patternProperties": {"^[a-c]$": {"type": "boolean"}},
     "additionalProperties": False, "minProperties": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"type": "array", "items": {"minProperties": 2}},
    {"$defs": {"x": {"type": "object", "minProperties": 3, "properties": {"a": True},
                     "required": ["a"]}}},
])  # fmt: skip
def test_names_that_might_come_twice_are_not_counted(schema: dict[str, Any]) -> None:
    """`{"b": false, "b": false}` ended with STOP as an object of two properties."""
    with pytest.raises(InvalidRequestError, match=r"minProperties: \d cannot be enforced"):
        make_grammar(StructuredOutput(json_schema=schema))


def test_what_counts_names_that_are_listed_is_taken() -> None:
    listed = {"a": {"type": "boolean"}, "b": {"type": "boolean"}}
    for schema in (
        {"type": "object", "properties": listed, "additionalProperties": False, "minProperties": 2},
        {"type": "object", "properties": listed, "required": ["a"], "minProperties": 2},
        {"properties": {"minProperties": {"type": "integer"}}, "required": ["minProperties"]},
        {"enum": [{"minProperties": 7}]},
    ):
        assert make_grammar(StructuredOutput(json_schema=schema))


@pytest.mark.parametrize(
    ("pattern", "repaired"),
    [
        (r'^[^"]{1,4}$', r'^[[^"]&&[^\x00-\x1F]]{1,4}$'),
        (r"^[a-z\n]+\[[^a]\]$", r"^[a-z\n]+\[[^a]\]$"),
        (r"\P{P}x", r"[[\P{P}]&&[^\x00-\x1F]]x"),
        (r"[^[:punct:]]", r"[[^[:punct:]]&&[^\x00-\x1F]]"),
        (r"[]\]a]", r"[]\]a]"),
        ("[^", r"[[^&&[^\x00-\x1F]]"),
        ("a\\", "a\\"),
    ],
)
def test_only_classes_that_would_leak_are_narrowed(pattern: str, repaired: str) -> None:
    assert repair_pattern(pattern) == repaired


def test_an_escaped_quote_is_no_other_character() -> None:
    """`"\\""` ended with STOP where no quote may be."""
    structured_output = StructuredOutput(json_schema={"type": "string", "pattern": '^[^"]{1,4}$'})
    grammar = make_grammar(structured_output)
    for text, fits in (('"\\""', False), ('"a\\\\"', True), ('"aé"', True)):
        matcher = compile_grammar(structured_output, grammar, GRAMMAR_TOKENIZER)
        ids = TOKENIZER.encode(text)
        assert (matcher.validate_tokens(ids) == len(ids)) is fits
