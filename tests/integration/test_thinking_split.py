"""Thoughts through real routers and nodes: over every API, streamed, and behind a death.

One process is what the split must equal.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from baton import Client, Completion, SamplingParams, StructuredOutput, Thinking
from baton.api.outputs import TextDelta
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.checkpoints.thinking_model import write_thinking_model
from tests.fakes.processes.deployments import run_deployment
from tests.fakes.system.split_cases import THINKING_FAMILIES

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 9},
    },
    "required": ["name", "kinds"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "Go."}]
BUDGET = 30
TOOL = {"name": "look", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module", params=THINKING_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return write_thinking_model(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def deployment(model: Path) -> Iterator[LocalDeployment]:
    names = ["--served-model-name", "tiny"]
    with run_deployment(
        "--num-blocks", "600", model=model, http=True, num_decode=2, router_args=names
    ) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def client(deployment: LocalDeployment) -> Iterator[Any]:
    url = f"http://{deployment.config.http_listen}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


def fits(text: str | None) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text or "")))


def many_params(num: int, budget: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=900,
            seed=seed,
            structured_output=StructuredOutput(json_schema=SCHEMA),
            thinking=Thinking(budget_tokens=budget, must_open=True),
        )
        for seed in range(num)
    ]


def chat_prompts(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode_chat(MESSAGES)


def test_the_split_equals_one_process(deployment: LocalDeployment, llm: LLM) -> None:
    prompt = chat_prompts(llm)
    many = [
        *many_params(4, BUDGET),
        *many_params(2, 0),
        *(replace(one, structured_output=None, max_tokens=90) for one in many_params(4, 15)),
    ]
    alone = llm.generate([prompt] * len(many), many)
    with Client(deployment.config.listen) as grpc:
        split = [grpc.generate(prompt, one) for one in many]
    assert [one.token_ids for one in split] == [one.token_ids for one in alone]
    assert all(one.receipt is not None and one.receipt.decode is not None for one in split)
    assert all(one.finish_reason.value == "stop" for one in alone[:6])


def test_over_each_api_an_answer_fits_behind_its_thought(
    deployment: LocalDeployment, client: Any
) -> None:
    schema = {"name": "n", "schema": SCHEMA, "strict": True}
    given: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 900,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }  # fmt: skip
    extra: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    whole = client.chat.completions.create(**given, extra_body=extra).choices[0]
    assert whole.finish_reason == "stop"
    assert fits(whole.message.content)
    thought: str = whole.message.reasoning_content
    assert thought

    texts, thoughts = [], []
    for chunk in client.chat.completions.create(**given, extra_body=extra, stream=True):
        delta = chunk.choices[0].delta
        texts.append(delta.content or "")
        thoughts.append(getattr(delta, "reasoning_content", None) or "")
    assert ("".join(texts), "".join(thoughts)) == (whole.message.content, thought)

    answer = client.responses.create(
        model="tiny", input="Go.", max_output_tokens=900,
        text={"format": {"type": "json_schema", **schema}},
        extra_body={"reasoning": {"max_tokens": BUDGET, "enabled": True}, "seed": 3},
    )  # fmt: skip
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert fits(answer.output_text)

    url = f"http://{deployment.config.http_listen}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        create: Any = claude.messages.create
        message = create(
            model="tiny", max_tokens=900, messages=MESSAGES,
            thinking={"type": "enabled", "budget_tokens": BUDGET},
            extra_body={
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "seed": 3,
            },
        )  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert fits(message.content[1].text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_that_must_be_made_comes_behind_a_thought(client: Any, choice: Any) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=4, max_tokens=900,
        tools=[{"type": "function", "function": TOOL}], tool_choice=choice,
        parallel_tool_calls=False,
        extra_body={"reasoning": {"max_tokens": BUDGET}},
    ).choices[0]  # fmt: skip
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert fits(call.function.arguments)
    assert whole.message.reasoning_content


def test_a_client_that_wants_no_thought_gets_none(client: Any) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"thinking_token_budget": 0},
        {"reasoning": {"enabled": False}},
    ):
        schema = {"name": "n", "schema": SCHEMA}
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=5, max_tokens=900, extra_body=fields,
            response_format={"type": "json_schema", "json_schema": schema},
        ).choices[0]  # fmt: skip
        assert fits(whole.message.content)
        assert not getattr(whole.message, "reasoning_content", None)


def test_what_is_wrong_is_refused_with_one_line(client: Any) -> None:
    for fields, message in (
        ({"thinking_token_budget": -1}, "thinking_token_budget: must be a whole number from 0 to"),
        (
            {"reasoning": {"max_tokens": 3}, "thinking_token_budget": 4},
            "thinking_token_budget: must equal reasoning.max_tokens, got 4",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=fields)


class Reader(threading.Thread):
    """Reads one stream of many."""

    def __init__(self, address: str, prompt: list[int], params: SamplingParams) -> None:
        super().__init__()
        self.deltas: list[TextDelta] = []
        self._given = address, prompt, params

    def run(self) -> None:
        address, prompt, params = self._given
        with Client(address) as client:
            self.deltas += client.stream(prompt, params)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


def test_a_decode_node_that_dies_at_the_end_of_thoughts_changes_no_token(
    deployment: LocalDeployment, llm: LLM
) -> None:
    """(The last test of a family: one of two decode nodes is gone from here on.)"""
    prompt, budget = chat_prompts(llm), 600
    many = [replace(one, max_tokens=1500) for one in many_params(8, budget)]
    alone: list[Completion] = llm.generate([prompt] * len(many), many)
    readers = [Reader(deployment.config.listen, prompt, one) for one in many]
    counted = {"num": 0}

    def watch() -> None:
        with Client(deployment.config.listen) as client:
            for delta in client.stream(prompt, many[0]):
                counted["num"] += len(delta.token_ids)
                if counted["num"] >= budget + 1:  # at the closing mark
                    deployment.child("d0").process.kill()
                    return

    watcher = threading.Thread(target=watch)
    for thread in (*readers, watcher):
        thread.start()
    for thread in (*readers, watcher):
        thread.join()
    assert [tuple(one.token_ids) for one in readers] == [one.token_ids for one in alone]
    attempts = [
        delta.receipt.num_attempts
        for reader in readers
        for delta in reader.deltas
        if delta.receipt is not None
    ]
    assert max(attempts) > 1  # some were on the node that died
