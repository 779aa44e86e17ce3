"""Random structured outputs, each with a judge of its own that knows nothing of the engine.

All are bounded, so that the grammar ends the output and not `max_tokens`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput

MAX_TOKENS = 1200
WORDS = ("alpha", "beta", "x", "read_config", "été", "a b", "12", "日本", "None", "self.path")


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and a check whether a text is as the request demands."""

    prompt: str
    params: SamplingParams
    is_valid: Callable[[str], bool]


def make_cases(num_cases: int, seed: int) -> list[Case]:
    """Make cases of schemas, regexes, grammars and choices, at any temperature."""
    rng = random.Random(seed)
    makers = (_schema_case, _schema_case, _regex_case, _grammar_case, _choice_case)
    cases = []
    for index in range(num_cases):
        structured_output, is_valid = makers[index % len(makers)](rng)
        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=rng.choice((0.0, 0.5, 1.0, 1.5, 3.0)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            min_tokens=rng.choice((0, 0, 3)),
            ignore_eos=rng.random() < 0.2,
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            seed=rng.getrandbits(40),
            structured_output=structured_output,
        )
        prompt = f"def {rng.choice(('read', 'parse', 'main'))}_{index}("
        cases.append(Case(prompt, params, is_valid))
    return cases


Made = tuple[StructuredOutput, Callable[[str], bool]]

# ------------------------------------------------------------------ JSON schemas


def _schema_case(rng: random.Random) -> Made:
    schema = make_schema(rng, depth=3)
    validator = jsonschema.Draft202012Validator(schema)

    def is_valid(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    as_text = rng.random() < 0.5
    return StructuredOutput(json_schema=json.dumps(schema) if as_text else schema), is_valid


def make_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Make a bounded schema with an object at the top."""
    kinds = ["integer", "string", "boolean", "null", "enum", "const", "anyOf"]
    kind = rng.choice([*kinds, "object", "array", "object", "array"] if depth < 3 else ["object"])
    if depth == 0 and kind in ("object", "array", "anyOf"):
        kind = rng.choice(kinds[:-1])
    match kind:
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "string":
            low = rng.randint(0, 3)
            if rng.random() < 0.3:
                return {"type": "string", "pattern": "^[a-f]{1,4}-[0-9]{2}$"}
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, -5, True, None], k=3)}
        case "const":
            return {"const": rng.choice((*WORDS, 7, False))}
        case "anyOf":
            return {"anyOf": [make_schema(rng, depth - 1) for _ in range(2)]}
        case "array":
            low = rng.randint(0, 2)
            items = make_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "object":
            names = rng.sample(
                ("id", "name", "tags", "é", "a b", 'q"q', "value"), rng.randint(1, 4)
            )
            properties = {name: make_schema(rng, depth - 1) for name in names}
            return {
                "type": "object",
                "properties": properties,
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case _:
            return {"type": kind}


# ------------------------------------------------------------------ choices


def _choice_case(rng: random.Random) -> Made:
    count = rng.choice((1, 2, 5, 40))
    texts = {
        " ".join(rng.choices(WORDS, k=rng.randint(1, 3))) + rng.choice(("", "\n", '"', "\\"))
        for _ in range(count)
    }
    choice = tuple(sorted(texts))
    return StructuredOutput(choice=choice), texts.__contains__


# ------------------------------------------------------------------ regexes and grammars

Node = tuple[Any, ...]
"""("text", str), ("class", str), ("seq" | "alt", *nodes), ("repeat", node, low, high) or
("rule", name)."""


def _make_node(rng: random.Random, depth: int, rules: tuple[str, ...]) -> Node:
    kinds = ["text", "class", *["rule"] * bool(rules)]
    kind = rng.choice(kinds if depth == 0 else ["seq", "alt", "repeat", "seq", *kinds])
    match kind:
        case "text":
            return ("text", rng.choice(("ab", "(", ")", " = ", "é", "+", "if ", "0x", '"', "/")))
        case "class":
            return ("class", rng.choice(("a-z", "0-9", "A-Fa-f0-9", "xyz_")))
        case "rule":
            return ("rule", rng.choice(rules))
        case "repeat":
            low = rng.randint(0, 2)
            part = _make_node(rng, depth - 1, rules)
            # The library's reader of GBNF does not take a repetition of a repetition.
            return part if part[0] == "repeat" else ("repeat", part, low, low + rng.randint(1, 3))
        case _:
            return (kind, *(_make_node(rng, depth - 1, rules) for _ in range(rng.randint(2, 3))))


def _regex_case(rng: random.Random) -> Made:
    pattern = _as_regex(_make_node(rng, 3, ()))
    return StructuredOutput(regex=pattern), lambda text: re.fullmatch(pattern, text) is not None


def _as_regex(node: Node) -> str:
    match node:
        case ("text", text):
            return re.escape(str(text))
        case ("class", chars):
            return f"[{chars}]"
        case ("seq", *parts):
            return "".join(f"(?:{_as_regex(part)})" for part in parts)
        case ("alt", *parts):
            return "|".join(f"(?:{_as_regex(part)})" for part in parts)
        case ("repeat", part, low, high):
            return f"(?:{_as_regex(part)}){{{low},{high}}}"
    raise AssertionError(node)


def _grammar_case(rng: random.Random) -> Made:
    """Make a grammar whose rules name earlier rules, in Lark or in GBNF."""
    rules: dict[str, Node] = {}
    for name in ("item", "pair", "line")[: rng.randint(1, 3)]:
        rules[name] = _make_node(rng, 1, tuple(rules))
    top = _make_node(rng, 2, tuple(rules))
    in_lark = rng.random() < 0.5
    first, sign = ("start", ":") if in_lark else ("root", "::=")
    lines = [
        f"{name} {sign} {_as_grammar(node, in_lark)}"
        for name, node in ((first, top), *rules.items())
    ]
    grammar = StructuredOutput(grammar="\n".join(lines) + "\n")
    return grammar, lambda text: len(text) in _ends(top, rules, text, 0)


def _as_grammar(node: Node, in_lark: bool) -> str:
    match node:
        case ("text", text):
            return json.dumps(text, ensure_ascii=False)
        case ("class", chars):
            return f"/[{chars}]/" if in_lark else f"[{chars}]"
        case ("seq", *parts):
            return " ".join(f"({_as_grammar(part, in_lark)})" for part in parts)
        case ("alt", *parts):
            return " | ".join(f"({_as_grammar(part, in_lark)})" for part in parts)
        case ("repeat", part, low, high):
            return f"({_as_grammar(part, in_lark)}){{{low},{high}}}"
        case ("rule", name):
            return str(name)
    raise AssertionError(node)


def _ends(node: Node, rules: dict[str, Node], text: str, start: int) -> set[int]:
    """Return where a node that begins at ``start`` may end in the text, by definition."""
    match node:
        case ("text", literal):
            return {start + len(literal)} if text.startswith(literal, start) else set()
        case ("class", chars):
            return {start + 1} if re.match(f"[{chars}]", text[start : start + 1]) else set()
        case ("seq", *parts):
            ends = {start}
            for part in parts:
                ends = {end for begin in ends for end in _ends(part, rules, text, begin)}
            return ends
        case ("alt", *parts):
            return {end for part in parts for end in _ends(part, rules, text, start)}
        case ("repeat", part, low, high):
            ends, found = {start}, {start} if low == 0 else set()
            for count in range(1, high + 1):
                ends = {end for begin in ends for end in _ends(part, rules, text, begin)}
                found |= ends if count >= low else set()
            return found
        case ("rule", name):
            return _ends(rules[name], rules, text, start)
    raise AssertionError(node)
