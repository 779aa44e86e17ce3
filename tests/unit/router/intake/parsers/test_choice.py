"""Unit tests of which parsers a model's outputs go through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.text.tokenizer import Tokenizer
from router.intake.parsers.base import ParserContext
from router.intake.parsers.choice import OutputParsers
from router.intake.parsers.hermes import Hermes
from router.intake.parsers.plain import OneCall, PlainText
from router.intake.parsers.think import ThinkFirst

ROOT = Path(__file__).parents[5]
TEMPLATES = ROOT / "tests" / "fakes" / "chat_templates"
DEMO = ROOT / "examples" / "demo_model"
WITH_TOOLS = ParserContext({"f": {}})


def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(DEMO, chat_template=TEMPLATES / f"{family}.jinja")


@pytest.mark.parametrize(
    ("family", "calls", "reasoning"),
    [
        ("llama3", "llama3_json", "none"),
        ("qwen2_5", "hermes", "none"),
        ("qwen3", "hermes", "qwen3"),
        ("mistral", "mistral", "none"),
        ("hermes2pro_tool_use", "hermes", "none"),
        ("deepseek", "hermes", "qwen3"),  # it takes no tools: they are told in Hermes' form
        ("gemma", "hermes", "none"),
        ("gpt_oss", "openai", "openai_gptoss"),
        ("smollm2", "hermes", "none"),
    ],
)
def test_the_template_says_which_parsers(family: str, calls: str, reasoning: str) -> None:
    parsers = OutputParsers(tokenizer_of(family))
    assert (parsers.tool_call_parser, parsers.reasoning_parser) == (calls, reasoning)


def test_what_is_named_is_used() -> None:
    parsers = OutputParsers(tokenizer_of("qwen3"), "mistral", "none")
    assert (parsers.tool_call_parser, parsers.reasoning_parser) == ("mistral", "none")
    assert isinstance(OutputParsers(None, "none").make(WITH_TOOLS), PlainText)
    with pytest.raises(ConfigError, match="unknown tool-call parser 'x'"):
        OutputParsers(None, "x")
    with pytest.raises(ConfigError, match="unknown reasoning parser 'x'"):
        OutputParsers(None, reasoning_parser="x")


def test_an_output_is_divided_as_its_request_says() -> None:
    parsers = OutputParsers(tokenizer_of("qwen3"))
    assert isinstance(parsers.make(ParserContext()), ThinkFirst)
    assert isinstance(parsers.make(WITH_TOOLS, is_constrained=True), Hermes)
    assert isinstance(parsers.make(WITH_TOOLS, is_forced=True), OneCall)
    assert isinstance(parsers.make(ParserContext(), is_constrained=True), PlainText)


def test_special_tokens_that_are_parsed_are_shown(tmp_path: Path) -> None:
    described = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocab_size = 4096
    names = ["[TOOL_CALLS]", "<think>"]
    described["added_tokens"] += [
        {**described["added_tokens"][0], "id": vocab_size + i, "content": name}
        for i, name in enumerate(names)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    shutil.copy(TEMPLATES / "mistral.jinja", tmp_path / "chat_template.jinja")
    parsers = OutputParsers(Tokenizer(tmp_path), reasoning_parser="qwen3")
    assert parsers.shown_token_ids(with_tools=False) == {vocab_size + 1}
    assert parsers.shown_token_ids(with_tools=True) == {vocab_size, vocab_size + 1}
