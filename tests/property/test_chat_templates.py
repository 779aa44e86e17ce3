"""Property test: chat templates are rendered as `transformers` renders them, family by family.

`tests/fakes/answers/chat_templates` has our own templates in the shape of each family's.
"""

from __future__ import annotations

import random
from pathlib import Path

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from baton.api.errors import InvalidRequestError
from baton.text.chat_template import DEFAULT, TOOL_USE, ChatTemplate
from tests.fakes.answers.conversations import Message, Tool, make_conversation
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.property.num_examples import num_examples

TEMPLATES = Path(__file__).parents[1] / "fakes" / "answers" / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {
    "llama3": {DEFAULT: "llama3"},
    "qwen2_5": {DEFAULT: "qwen2_5"},
    "qwen3": {DEFAULT: "qwen3"},
    "mistral": {DEFAULT: "mistral"},
    "hermes2pro": {DEFAULT: "hermes2pro_default", TOOL_USE: "hermes2pro_tool_use"},
    "deepseek": {DEFAULT: "deepseek"},
    "gemma": {DEFAULT: "gemma"},
    "phi": {DEFAULT: "phi"},
    "gpt_oss": {DEFAULT: "gpt_oss"},
    "smollm2": {DEFAULT: "smollm2"},
    "generation": {DEFAULT: "generation"},
}


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO_MODEL / "tokenizer.json"), **SPECIAL)


def sources_of(family: str) -> dict[str, str]:
    return {
        name: (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
        for name, file in FAMILIES[family].items()
    }


def rendered_by_them(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: list[Tool],
    options: dict[str, object],
) -> str | None:
    """Render with transformers; None: the template refuses the messages."""
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            **{"add_generation_prompt": True, **options},
        )
    except (jinja2.TemplateError, TypeError, RecursionError):
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_the_text_that_transformers_makes_of_it(
    family: str, theirs: PreTrainedTokenizerFast
) -> None:
    sources = sources_of(family)
    theirs.chat_template = sources if len(sources) > 1 else sources[DEFAULT]
    ours = ChatTemplate(sources, SPECIAL, TEMPLATES)
    rng, num, num_refused = random.Random(f"templates of {family}"), num_examples(25), 0
    for _ in range(num):
        messages, tools = make_conversation(rng)
        options: dict[str, object] = {
            name: value
            for name, value in {
                "enable_thinking": False,
                "add_generation_prompt": False,
                "reasoning_effort": "high",
                "date_string": "1 May 2026",
            }.items()
            if rng.random() < 0.2
        }
        expected = rendered_by_them(theirs, messages, tools, options)
        try:
            found = ours.render(messages, tools=tools, options=options)
        except InvalidRequestError:
            assert expected is None
            num_refused += 1
        else:
            assert found == expected
    assert num_refused < 0.8 * num
