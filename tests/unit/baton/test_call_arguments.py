"""Unit tests of call arguments: whatever a model wrote becomes an object for the next prompt."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baton.text.call_arguments import read_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"x": 1}', {"x": 1}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('""', {}),
        ('"{}"', {}),
        ('"{\\"x\\": [1]}"', {"x": [1]}),
        ("{", {}),
        ('{"te', {}),
        ('{"text"', {}),
        ('{"text": ', {}),
        ('{"text": "', {"text": ""}),
        ('{"text": "def f():\\n  a, b = {', {"text": "def f():\n  a, b = {"}),
        ('{"text": "a\\', {"text": "a"}),
        ('{"text": "a\\u00e', {"text": "a"}),
        ('{"text": "a\\\\', {"text": "a\\"}),
        ('{"text": "\\ud83d', {"text": "\N{REPLACEMENT CHARACTER}"}),
        ('{"x": "\\ud800", "\\udfff": 1}', {"x": "\ufffd", "\ufffd": 1}),
        ('{"x": tr', {}),
        ('{"x": 1, "y": tr', {"x": 1}),
        ('{"x": [1, 2', {"x": [1, 2]}),
        ('{"x": [1, {"y": "z', {"x": [1, {"y": "z"}]}),
        ('{"x": [1, {"y": "z"}], "u', {"x": [1, {"y": "z"}]}),
        ('{"x": 1}} and more', {"x": 1}),
        ('{"x": [1}', {"x": []}),
        ("{nonsense", {}),
        ("5", {"arguments": 5}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ('"Bonn"', {"arguments": "Bonn"}),
        ("Bonn", {"arguments": "Bonn"}),
    ],
)
def test_arguments_become_an_object(text: str, value: dict[str, Any]) -> None:
    assert read_arguments(text) == value


def test_arguments_nested_without_end_are_read_in_no_time() -> None:
    text = '{"x": ' + "[" * 200_000
    assert read_arguments(text) == {"arguments": text}


def test_every_beginning_of_an_object_keeps_what_is_certain() -> None:
    rng = random.Random("cuts")
    words = ['"', "\\", "größe", "日本", "👩‍🚀", ", ", "{", "]", "\n", "\u0007"]

    def draw(depth: int) -> Any:
        kind = rng.randrange(4 if depth else 2)
        if kind == 0:
            return rng.choice([None, True, False, 12, -0.5])
        if kind == 1:
            return "".join(rng.choices(words, k=4))
        if kind == 2:
            return [draw(depth - 1) for _ in range(rng.randrange(3))]
        return {f"k{index}": draw(depth - 1) for index in range(rng.randrange(3))}

    for _ in range(40):
        value = {f"k{index}": draw(2) for index in range(3)}
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        for cut in range(1, len(text) + 1):
            found = read_arguments(text[:cut])
            assert list(found) == list(value)[: len(found)]
            # Only the last member of the object may be incomplete.
            assert all(found[name] == value[name] for name in list(found)[:-1])
        assert found == value
