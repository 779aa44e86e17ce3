"""Thoughts before constrained answers, in the forms of many families: all outputs are valid.

Models are random: what they write is the grammar's and the budget's work alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from baton.api.outputs import FinishReason
from baton.text.tokenizer import Tokenizer
from engine import LLM
from engine.core.request import Request
from tests.fakes.answers.asked_chats import AskedChat, Said, ask
from tests.fakes.answers.structured_cases import make_schema
from tests.fakes.checkpoints.thinking_model import FAMILIES, write_thinking_model

pytestmark = [pytest.mark.large, pytest.mark.timeout(400)]

NUM_CASES = 4  # of each family, form and way to think
ANSWER = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["done"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "Rome"]},
        "days": {"$ref": "#/$defs/Days"},
        "note": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "now": {"type": ["boolean", "null"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WAYS: dict[str, dict[str, Any]] = {
    "by default": {},
    "with a budget": {"thinking_token_budget": 12},
    "of a token": {"reasoning": {"max_tokens": 1}},
    "switched on": {"thinking": {"type": "enabled", "budget_tokens": 20}},
    "off": {"reasoning_effort": "none"},
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **fields}}


def fits(schema: dict[str, Any], text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def all_fit(said: Said) -> bool:
    return all(
        name in ("look", "find") and fits(PARAMETERS, written) for name, written in said.calls
    )


Judge = Callable[[Said], bool]


def schema_form(rng: random.Random) -> tuple[dict[str, Any], Judge]:
    schema = make_schema(rng, depth=3)
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    return body, lambda said: fits(schema, said.text) and not said.calls


def regex_form(rng: random.Random) -> tuple[dict[str, Any], Judge]:
    regex = f"[a-{rng.choice('fz')}]{{1,4}}-[0-9]{{{rng.randint(1, 3)}}}"
    return {"regex": regex}, lambda said: re.fullmatch(regex, said.text) is not None


def required_form(rng: random.Random) -> tuple[dict[str, Any], Judge]:
    tools = [tool("look"), tool("find")]
    several = rng.random() < 0.5
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": several}

    def judge(said: Said) -> bool:
        has_calls = len(said.calls) >= 1 if several else len(said.calls) == 1
        return has_calls and not said.text.strip() and all_fit(said)

    return body, judge


def beside_form(rng: random.Random) -> tuple[dict[str, Any], Judge]:
    """A response format beside tools: calls, or an answer that fits."""
    body = {
        "tools": [tool("look", strict=True)],
        "response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}},
    }
    return body, lambda said: all_fit(said) and bool(said.calls or fits(ANSWER, said.text))


def strict_form(rng: random.Random) -> tuple[dict[str, Any], Judge]:
    tools = [tool("look", strict=True), tool("find", strict=True)]
    return {"tools": tools, "parallel_tool_calls": rng.random() < 0.7}, all_fit


FORMS = {
    "schema": schema_form,
    "regex": regex_form,
    "required": required_form,
    "beside": beside_form,
    "strict": strict_form,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_thinking_model(tmp_path_factory.mktemp(family), family)
    return LLM(str(folder), dtype="float32", num_threads=1, num_blocks=2000)


def tokenizer_of(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


def nudged(chat: AskedChat, tokenizer: Tokenizer, rng: random.Random) -> AskedChat:
    """Have a random model write marks, and ends, as often as a trained one."""
    names = ("</think>", "</seed:think>", "<|end|>", "<tool_call>", "<|im_end|>")
    marks = [tokenizer.encode(name, add_special_tokens=False) for name in names]
    biases = {mark[0]: rng.uniform(3, 6) for mark in marks if len(mark) == 1}
    params = replace(
        chat.params,
        logit_bias=tuple(sorted(biases.items())),
        temperature=rng.choice((0.7, 1.0, 1.5)),
        seed=rng.getrandbits(40),
        max_tokens=800,
    )
    return replace(chat, params=params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_answer_fits_behind_its_thought(llm: LLM, family: str, form: str, way: str) -> None:
    rng, tokenizer = random.Random(f"{family} {form} {way}"), tokenizer_of(llm)
    asked: list[tuple[AskedChat, Judge]] = []
    for _ in range(NUM_CASES):
        body, judge = FORMS[form](rng)
        chat = ask(tokenizer, {**body, **WAYS[way]})
        asked.append((nudged(chat, tokenizer, rng), judge))
    done = llm.generate([chat.prompt for chat, _ in asked], [chat.params for chat, _ in asked])
    num_thoughts = 0
    for (chat, judge), completion in zip(asked, done, strict=True):
        said = chat.read(completion.token_ids)
        shown = (chat.params.structured_output, tokenizer.decode(completion.token_ids), said)
        if completion.finish_reason is FinishReason.LENGTH:
            # A free text, calls without end, or a thought without a budget take all tokens.
            assert form in ("beside", "strict", "required") or way == "by default", shown
            continue
        assert completion.finish_reason is FinishReason.STOP, shown
        assert judge(said), shown
        num_thoughts += bool(said.reasoning)
        thinking = chat.params.thinking
        if thinking is not None and thinking.budget_tokens is not None:
            assert thought_tokens(chat, completion.token_ids) <= thinking.budget_tokens, shown
    if way == "off":
        assert not num_thoughts
    elif way == "switched on":
        assert num_thoughts


def thought_tokens(chat: AskedChat, token_ids: Sequence[int]) -> int:
    """Count a thought's tokens by its marks, which are whole in the output."""
    thinking = chat.params.thinking
    assert thinking is not None
    token_ids, close, start = list(token_ids), list(thinking.close_token_ids), 0
    if not thinking.is_open:
        opens = [list(mark) for mark in thinking.open_marks]
        begun = [mark for mark in opens if token_ids[: len(mark)] == mark]
        if not begun:
            return 0
        start = len(begun[0])
    for end in range(start, len(token_ids)):
        if token_ids[end : end + len(close)] == close:
            return end - start
    return len(token_ids) - start


def test_an_output_goes_on_alike_wherever_its_node_died(llm: LLM, family: str) -> None:
    """A router sends the tokens so far to another node: in the thought, at its marks, behind it."""
    rng, tokenizer = random.Random(7), tokenizer_of(llm)
    for form in ("schema", "strict"):
        body, _ = FORMS[form](rng)
        chat = nudged(ask(tokenizer, {**body, "thinking_token_budget": 6}), tokenizer, rng)
        params = replace(chat.params, max_tokens=60)
        (whole,) = llm.generate([chat.prompt], params)
        for num_tokens in range(1, len(whole.token_ids), 3):
            request = Request.create(
                f"{form}-{num_tokens}",
                chat.prompt,
                params,
                seed=params.seed or 0,
                eos_token_ids=llm.engine.eos_token_ids,
                max_model_len=llm.engine.max_model_len,
                output_token_ids=whole.token_ids[:num_tokens],
            )
            llm.engine.add_request(request)
            while llm.engine.has_work or request.awaits_grammar:
                llm.engine.step()
            assert tuple(request.output_token_ids) == whole.token_ids, num_tokens


@pytest.mark.parametrize("speculation", ["ngram"])
def test_drafts_change_no_token(
    family: str, llm: LLM, speculation: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_thinking_model(tmp_path_factory.mktemp(family), family)
    drafting = LLM(
        str(folder), dtype="float32", num_threads=1, num_blocks=2000,
        speculative_method=speculation, num_speculative_tokens=4, adaptive_speculation=False,
    )  # fmt: skip
    rng, tokenizer = random.Random(8), tokenizer_of(llm)
    chats = []
    for form in FORMS:
        for way in ("with a budget", "switched on", "by default"):
            body, _ = FORMS[form](rng)
            chat = nudged(ask(tokenizer, {**body, **WAYS[way]}), tokenizer, rng)
            # Next to greedy: such a model repeats itself, so that drafts are often right.
            params = replace(chat.params, temperature=0.2, max_tokens=120)
            chats.append(replace(chat, params=params))
    prompts, params_list = [chat.prompt for chat in chats], [chat.params for chat in chats]
    alone = llm.generate(prompts, params_list)
    drafted = drafting.generate(prompts, params_list)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in alone]
    metrics = drafting.metrics()
    assert metrics.accepted_drafts_total > 0
