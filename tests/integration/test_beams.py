"""Beam searches of clients on real nodes with NIXL give the beams of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton import AsyncClient, Client
from baton.api.beam_search import BeamCompletion
from baton.api.errors import InvalidRequestError
from baton.deployment.local_deployment import LocalDeployment
from engine import LLM

pytestmark = [pytest.mark.nixl, pytest.mark.large, pytest.mark.timeout(300)]

PROMPTS = ["def is_empty(self):", "import os\n", "class Node:\n    def __init__(self"]
WIDTH, NUM_TOKENS = 4, 12


@pytest.fixture(scope="module")
def expected(model_with_tools: Path) -> list[list[BeamCompletion]]:
    llm = LLM(str(model_with_tools), dtype="float32", num_threads=1)
    return llm.beam_search(PROMPTS, beam_width=WIDTH, max_tokens=NUM_TOKENS, length_penalty=0.5)


@pytest.fixture(scope="module")
def client(api: LocalDeployment) -> Iterator[Client]:
    with Client(api.config.listen) as opened:
        yield opened


def test_clients_get_the_beams_of_one_process(
    api: LocalDeployment, client: Client, expected: list[list[BeamCompletion]]
) -> None:
    options: Any = {"beam_width": WIDTH, "max_tokens": NUM_TOKENS, "length_penalty": 0.5}
    assert client.beam_search(PROMPTS, **options) == expected

    async def run() -> list[list[BeamCompletion]]:
        async with AsyncClient(api.config.listen) as opened:
            return await opened.beam_search(PROMPTS, **options)

    assert asyncio.run(run()) == expected


def test_the_openai_client_gets_the_best_of_them(
    api: LocalDeployment, expected: list[list[BeamCompletion]]
) -> None:
    url = f"http://{api.config.http_listen}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        for prompt, beams in zip(PROMPTS, expected, strict=True):
            found = opened.completions.create(
                model="demo", prompt=prompt, n=2, best_of=WIDTH, max_tokens=NUM_TOKENS,
                extra_body={"use_beam_search": True, "length_penalty": 0.5},
            )  # fmt: skip
            assert [one.text for one in found.choices] == [beam.text for beam in beams[:2]]
            assert [one.finish_reason for one in found.choices] == [
                beam.finish_reason.value for beam in beams[:2]
            ]
            assert found.usage is not None
            assert found.usage.completion_tokens == sum(len(b.token_ids) for b in beams[:2])
        chat = opened.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Say it"}], n=2, max_tokens=4,
            extra_body={"use_beam_search": True},
        )  # fmt: skip
        assert len(chat.choices) == 2


def test_what_is_out_of_range_is_one_line(client: Client) -> None:
    for options, problem in (
        ({"beam_width": 21}, "beam_width: must be a whole number from 1 to 20"),
        ({"max_tokens": 1025}, "max_tokens: must be at most 1024 in a beam search"),
        ({"priority": 2**31}, "priority: "),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{problem}"):
            client.beam_search(PROMPTS[:1], **options)  # type: ignore[arg-type]  # what is tested
