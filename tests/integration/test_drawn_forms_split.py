"""Drawn forms through real routers and nodes: the answers of one process, also behind a death."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from baton import Client, SamplingParams, Thinking
from baton.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from tests.fakes.asked_chats import Said
from tests.fuzz.drawn_forms import FORMS, Asked, DrawnForms
from tests.integration.conftest import READY_TIMEOUT_S

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(400)]

FAMILIES = ("qwen3", "glm45", "gpt_oss")
NUM_DRAWS = 4  # of each form, with and without a thought
BUDGET = 150


@pytest.fixture(scope="module", params=FAMILIES)
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrawnForms:
    return DrawnForms(request.param, tmp_path_factory.mktemp(request.param), seed=2)


@pytest.fixture(scope="module")
def deployment(forms: DrawnForms) -> Iterator[LocalDeployment]:
    config = LocalDeploymentConfig(
        model=str(forms.folder),
        listen=free_address(),
        http_listen=free_address(),
        num_decode=2,
        router_args=["--served-model-name", "tiny", "--no-local-prefill"],
        node_args=["--dtype", "float32", "--num-blocks", "900"],
    )
    with LocalDeployment(config) as running:
        running.wait_ready(READY_TIMEOUT_S)
        yield running


def draws(forms: DrawnForms, first: int, budget: int | None = None) -> list[Asked]:
    refused = Counter[str]()
    asked = [
        one
        for form in FORMS
        for number in range(first, first + NUM_DRAWS)
        for one in forms.asked(form, number, refused, budget=budget)
    ]
    assert len(asked) > 4 * NUM_DRAWS, refused
    return asked


def alone(forms: DrawnForms, asked: list[Asked]) -> list[Said]:
    """Return the answers of one process."""
    counts, faults = Counter[str](), list[str]()
    done = forms.complete(asked)
    for one, completion in zip(asked, done, strict=True):
        faults += forms.judge(one, completion, counts)
    assert not faults
    assert counts["thoughts"] > NUM_DRAWS
    return [one.chat.read(done_.token_ids) for one, done_ in zip(asked, done, strict=True)]


def post(deployment: LocalDeployment, body: dict[str, Any]) -> Said:
    url = f"http://{deployment.config.http_listen}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return Said(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        tuple((call["name"], call["arguments"]) for call in calls),
    )


def post_all(deployment: LocalDeployment, asked: list[Asked]) -> list[Said]:
    bodies = [one.http_body("tiny") for one in asked]
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: post(deployment, body), bodies))


def num_attempts(deployment: LocalDeployment) -> float:
    text = httpx.get(f"http://{deployment.config.http_listen}/metrics").text
    found = re.search(r"^baton_router_attempts_total (\S+)", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def differences(asked: list[Asked], split: list[Said], whole: list[Said]) -> list[Any]:
    return [
        (one.name, said, expected)
        for one, said, expected in zip(asked, split, whole, strict=True)
        if said != expected
    ]


def test_the_split_gives_the_answers_of_one_process(
    deployment: LocalDeployment, forms: DrawnForms
) -> None:
    asked = draws(forms, 0)
    whole = alone(forms, asked)
    assert differences(asked, post_all(deployment, asked), whole) == []


def test_a_decode_node_that_dies_between_thought_and_answer_changes_no_answer(
    deployment: LocalDeployment, forms: DrawnForms
) -> None:
    """(The last test of a family: one of two decode nodes is gone from here on.)"""
    asked = draws(forms, 50, budget=BUDGET)
    whole, before = alone(forms, asked), num_attempts(deployment)
    given = SamplingParams(
        max_tokens=BUDGET + 90,
        seed=1,
        thinking=Thinking(budget_tokens=BUDGET, must_open=True),
    )
    num_tokens = {"seen": 0}

    def kill_at_the_closing_mark() -> None:
        with Client(deployment.config.listen) as client:
            for delta in client.stream(asked[0].chat.prompt, given):
                num_tokens["seen"] += len(delta.token_ids)
                if num_tokens["seen"] > BUDGET:
                    deployment.child("d0").process.kill()
                    return

    watcher = threading.Thread(target=kill_at_the_closing_mark)
    watcher.start()
    split = post_all(deployment, asked)
    watcher.join()
    assert num_tokens["seen"] > BUDGET
    assert differences(asked, split, whole) == []
    assert num_attempts(deployment) > before + len(asked)
