"""Unit tests of which parsers a model's outputs go through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.text.tokenizer import Tokenizer
from router.intake.parsers.base import ParserContext, Reasoning
from router.intake.parsers.choice import OutputParsers
from router.intake.parsers.plain import OneCall, PlainText
from router.intake.parsers.source import ScriptedParser
from router.intake.parsers.think import ThinkFirst
from tests.fakes.answers.parsed_outputs import parse

ROOT = Path(__file__).parents[5]
TEMPLATES = ROOT / "tests" / "fakes" / "answers" / "chat_templates"
DEMO = ROOT / "examples" / "demo_model"
VOCAB_SIZE = 4096
WITH_TOOLS = ParserContext({"f": {}})


def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(DEMO, chat_template=TEMPLATES / f"{family}.jinja")


def with_special_tokens(folder: Path, family: str, names: list[str]) -> Tokenizer:
    """Make the demo model's tokenizer with a family's template and more special tokens."""
    described = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    described["added_tokens"] += [
        {**described["added_tokens"][0], "id": VOCAB_SIZE + i, "content": name}
        for i, name in enumerate(names)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    shutil.copy(TEMPLATES / f"{family}.jinja", folder / "chat_template.jinja")
    return Tokenizer(folder)


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
    assert type(parsers.make(WITH_TOOLS, is_constrained=True)) is ScriptedParser
    assert isinstance(parsers.make(WITH_TOOLS, is_forced=True), OneCall)
    assert isinstance(parsers.make(ParserContext(), is_constrained=True), PlainText)


@pytest.mark.parametrize(
    ("family", "special_tokens", "end"),
    [
        ("qwen3", ["<think>", "</think>"], "</think>\n\n"),
        ("qwen3", [], "</think>\n\n"),
        ("deepseek", ["<|User|>", "<|Assistant|>"], "</think>"),
        ("gpt_oss", ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
         "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)  # fmt: skip
def test_an_answer_goes_on_with_the_thought_that_the_prompt_ends_in(
    tmp_path: Path, family: str, special_tokens: list[str], end: str
) -> None:
    """Regression: eight tokens of a prompt were looked at, and a thought could not be continued."""
    tokenizer = with_special_tokens(tmp_path, family, special_tokens)
    parsers = OutputParsers(tokenizer)
    thought = "First, I look at the tag and its end. " * 40
    messages = [
        {"role": "user", "content": "What does <think> do?"},
        {"role": "assistant", "content": "", "reasoning_content": thought, "thinking": thought},
    ]
    if family == "gpt_oss":  # its template shows a thought before a call only
        user = "<|start|>user<|message|>What does <think> do?<|end|>"
        begun = f"<|start|>assistant<|channel|>analysis<|message|>{thought}"
        prompt = tokenizer.encode(user + begun)
    else:
        options = {"add_generation_prompt": False}
        prompt = tokenizer.encode_chat(messages, template_options=options, continues_last=True)
    assert tokenizer.decode(prompt).endswith("and its end. ")
    context = ParserContext(prompt_end=parsers.prompt_end(prompt))
    found = parse(parsers.make(context), [f"So.{end}It marks."])
    assert found == [Reasoning("So."), "It marks."]


def test_a_tag_in_what_a_user_wrote_begins_no_thought() -> None:
    tokenizer = tokenizer_of("qwen3")
    parsers = OutputParsers(tokenizer)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is <think>?"}])
    context = ParserContext(prompt_end=parsers.prompt_end(prompt))
    assert parse(parsers.make(context), ["A tag."]) == ["A tag."]


def test_special_tokens_that_are_parsed_are_shown(tmp_path: Path) -> None:
    tokenizer = with_special_tokens(tmp_path, "mistral", ["[TOOL_CALLS]", "<think>"])
    parsers = OutputParsers(tokenizer, reasoning_parser="qwen3")
    assert parsers.shown_token_ids(with_tools=False) == {VOCAB_SIZE + 1}
    assert parsers.shown_token_ids(with_tools=True) == {VOCAB_SIZE, VOCAB_SIZE + 1}
