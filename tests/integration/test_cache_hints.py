"""Tests of the clients `openai`, `anthropic` and `baton` with hints about repeated prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from baton import Client, SamplingParams
from baton.api.errors import InvalidRequestError
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM
from tests.fakes.processes.deployments import wait_for_beats

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(180)]

RULES = "Answer with one line of Python. " + " ".join(f"Rule {i}: be brief." for i in range(12))
ASKED = "Write the function `is_empty(self)`"
NUM_TRIES = 3


def test_hints_pin_prompts_and_change_no_token(
    api: LocalDeployment, model_with_tools: Path
) -> None:
    url = f"http://{api.config.http_listen}"
    llm = LLM(str(model_with_tools), dtype="float32", num_threads=1)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert any(_ask_openai(client, api, llm, f"Try {number}.") for number in range(NUM_TRIES))
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        _ask_anthropic(claude)
    with Client(api.config.listen) as plain:
        answer = plain.generate(
            [7] * 40, SamplingParams(max_tokens=2), session_id="s", pin_s=30.0, timeout_s=60
        )
        assert answer.receipt is not None
        assert answer.receipt.num_pinned_tokens == 32
        with pytest.raises(InvalidRequestError, match=r"pins\[0\].ttl_s: must be above 0"):
            plain.generate([7] * 40, pin_s=-1.0, timeout_s=60)


def _ask_openai(client: openai.OpenAI, api: LocalDeployment, llm: LLM, start: str) -> bool:
    """Ask three times, and check the answers; return whether the cached tokens were checked.

    If a node stands still, another node computes the prompt, whose cache may not have the prompt.
    """
    messages: list[Any] = [
        {"role": "system", "content": f"{start} {RULES}"},
        {"role": "user", "content": ASKED},
    ]
    (expected,) = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0))
    given: dict[str, Any] = {
        "model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0,
        "extra_body": {"include_receipt": True},
    }  # fmt: skip
    hints: list[dict[str, Any]] = [
        {"prompt_cache_key": "k" * 1000, "prompt_cache_retention": "24h"},
        {"prompt_cache_key": "k" * 1000, "prompt_cache_options": {"ttl": "30m"}},
        {},
    ]
    answers = []
    for hint in hints:
        wait_for_beats(api)
        answers.append(client.chat.completions.create(**given, **hint))
    assert [answer.choices[0].message.content for answer in answers] == [expected.text] * 3
    receipts: list[Any] = [answer.model_dump()["baton"]["receipts"][0] for answer in answers]
    pinned = [(one["prefill"] or one["decode"])["num_pinned_tokens"] for one in receipts]
    num_tokens = receipts[0]["num_prompt_tokens"]
    assert pinned == [num_tokens // 16 * 16] * 2 + [0]
    odd: dict[str, Any] = {**given, "prompt_cache_retention": "a week"}
    raw = client.chat.completions.with_raw_response.create(**odd)
    assert raw.headers["X-Baton-Ignored-Fields"] == "prompt_cache_retention"
    holders: set[str] = set()  # nodes whose cache has the prompt
    for number, one in enumerate(receipts):
        node = one["prefill_node"] if one["prefill"] else one["decode_node"]
        if number and node not in holders:
            return False
        holders |= {node, one["decode_node"]}
    cached: list[Any] = [answer.usage and answer.usage.prompt_tokens_details for answer in answers]
    assert [one.cached_tokens for one in cached] == [0] + [(num_tokens - 1) // 16 * 16] * 2
    return True


def _ask_anthropic(claude: anthropic.Anthropic) -> None:
    mark: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": f"Once more. {RULES}", "cache_control": mark}]
    question: Any = [
        {"type": "text", "text": ASKED * 4, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Now."},
    ]
    given: dict[str, Any] = {"model": "demo", "max_tokens": 8, "system": system}
    first = claude.messages.create(**given, messages=[{"role": "user", "content": "Hello " * 20}])
    usage = first.usage
    created = usage.cache_creation_input_tokens or 0
    assert (created > 64, created % 16, usage.cache_read_input_tokens) == (True, 0, 0)
    assert usage.input_tokens > 20
    turns: list[Any] = [{"role": "user", "content": question}]
    second = claude.messages.create(**given, messages=turns).usage
    read, made = second.cache_read_input_tokens or 0, second.cache_creation_input_tokens or 0
    assert read >= created - 16
    assert 0 < made < created
    count = claude.messages.count_tokens(model="demo", system=system, messages=turns)
    assert second.input_tokens + read + made == count.input_tokens
