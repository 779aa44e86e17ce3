"""Property tests: every parser reads an output equally in any pieces, and none raises."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router.intake.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from router.intake.parsers.base import OutputParser, Reasoning
from tests.fakes.answers.parsed_outputs import make_parser, make_reasoning_parser, parse
from tests.property.num_examples import num_examples

PIECES = (
    "<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", "arguments": ', '{"x": "a"}',
    '{"name": "g", "parameters": {}}', "}", "{", "[", "]", '"', "\\", ",", ":", ";", " ", "\n",
    "[TOOL_CALLS]", "[ARGS]", "f", "g", "(", ")", "x=1", "x='a'", "<function=f>", "<parameter=x>",
    "</parameter>", "</function>", "<|python_tag|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "```json\n", "<|channel|>", "analysis", "final", "commentary",
    " to=functions.f", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<think>", "</think>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<seed:tool_call>", "</seed:tool_call>",
    "<|tool_call|>", "<tool_call>",
    "functools", "<|tool_call|>", "<|/tool_call|>",
    "<TOOLCALL>", "</TOOLCALL>",
    "<|tool_call_start|>", "<|tool_call_end|>",
    "<function_calls>", "</function_calls>",
    "é", "日", "null", "1", "\\ud800", "\x00", "'",
)  # fmt: skip
KINDS = [
    *((name, make_parser) for name in TOOL_CALL_PARSERS.names()),
    *((name, make_reasoning_parser) for name in REASONING_PARSERS.names()),
]


@pytest.mark.parametrize(("name", "make"), KINDS)
def test_any_output_in_any_pieces_is_parsed_alike(
    name: str, make: Callable[[str, str], OutputParser]
) -> None:
    rng = random.Random(f"outputs of {name}")
    for _ in range(num_examples(400)):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 14)))
        prompt_end = rng.choice(("", "<think>\n"))
        whole = parse(make(name, prompt_end), [text])
        assert parse(make(name, prompt_end), text) == whole
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 4)))
        bounds = zip([0, *cuts], [*cuts, len(text)], strict=True)
        assert parse(make(name, prompt_end), [text[a:b] for a, b in bounds]) == whole
        for part in whole:
            said = part.text if isinstance(part, Reasoning) else "".join(part)
            said.encode()
