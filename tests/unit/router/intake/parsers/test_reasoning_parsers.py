"""Unit tests of parsers of reasoning."""

from __future__ import annotations

import pytest

from baton.text.thoughts.marks import THINK
from router.intake.parsers.base import ParserContext, Reasoning
from router.intake.parsers.think import ThinkFirst, ThinkForm
from tests.fakes.answers.parsed_outputs import Found, make_parser, make_reasoning_parser, parse

CASES: list[tuple[str, str, str, Found]] = [
    ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), "Yes."]),
    ("qwen3", "", "Yes. <think>no</think>", ["Yes. <think>no</think>"]),
    ("qwen3", "", "\n\nYes", ["\n\nYes"]),
    ("qwen3", "", "<think>\n\n</think>\n\nYes", ["Yes"]),
    ("qwen3", "assistant\n<think>\n", "Hm.\n\nYes?\n</think>\nYes.",
     [Reasoning("Hm.\n\nYes?"), "Yes."]),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", ["Yes."]),
    ("qwen3", "", "<think>\nHm. <b", [Reasoning("Hm. <b")]),
    ("qwen3", "", "<thin", ["<thin"]),
    ("qwen3", "<think>\nHm, so", " it is.\n</think>\n\nYes.", [Reasoning(" it is."), "Yes."]),
    ("qwen3", "<think>\nHm.", "\nYes?\n</think>Yes.", [Reasoning("\nYes?"), "Yes."]),
    ("qwen3", "<think>\nHm.\n</think>\n\nY", "es.", ["es."]),
    ("qwen3", "<think>Hm.</think>Yes. <think>", "No.</think>No.", [Reasoning("No."), "No."]),
    ("deepseek_r1", "Hm, so", " it is.</think>Yes.", [Reasoning("it is."), "Yes."]),
    ("deepseek_r1", "<think>Hm.</think>\n\nYes", ", it is.", [", it is."]),
    ("openai_gptoss", "assistant<|channel|>analysis<|message|>So", " it is.<|end|>"
     "<|start|>assistant<|channel|>final<|message|>Yes.", [Reasoning(" it is."), "Yes."]),
    ("openai_gptoss", "assistant<|channel|>final<|message|>Yes", ", it is.", [", it is."]),
    ("seed_oss", "", "<seed:think>\nHm.</seed:think>\nYes.", [Reasoning("Hm."), "Yes."]),
    ("seed_oss", "<seed:think><seed:cot_budget_reflect>", "None.</seed:think>Yes.",
     [Reasoning("None."), "Yes."]),
    ("deepseek_r1", "", "Hm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    ("deepseek_r1", "", "<think>Hm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    ("deepseek_r1", "<think>\n\n</think>", "Yes.", ["Yes."]),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
     "final<|message|>Yes.", [Reasoning("Hm."), "Yes."]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt_end", "text", "expected"), CASES)
def test_reasoning_and_text_wherever_the_output_is_cut(
    name: str, prompt_end: str, text: str, expected: Found
) -> None:
    assert parse(make_reasoning_parser(name, prompt_end), [text]) == expected
    assert parse(make_reasoning_parser(name, prompt_end), text) == expected
    for cut in range(len(text)):
        assert parse(make_reasoning_parser(name, prompt_end), [text[:cut], text[cut:]]) == expected


def test_reasoning_is_shown_as_it_comes() -> None:
    parser = make_reasoning_parser("qwen3")
    assert list(parser.push("<think>")) == []
    assert list(parser.push("So")) == [Reasoning("So")]
    assert list(parser.push(", then\n")) == [Reasoning(", then")]


def test_calls_behind_reasoning_are_found_and_those_in_it_are_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    hermes = make_parser("hermes")
    parser = ThinkFirst(ThinkForm(THINK).make_parser(ParserContext()), hermes)
    found = parse(parser, [f"<think>{call}</think>\n{call}"])
    assert found == [Reasoning(call), ("f", "{}")]
