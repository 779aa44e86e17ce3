"""Drafts change nothing: tokens and logprobs are those of requests alone, without drafts.

In one process, in a split system, and in one whose nodes die; every method, 1, 3 and 5 drafts.
``BATON_REQUESTS`` says how many requests; `make speculation-long` compares more than 64,000 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.drafts import ALL
from engine.core.metrics import EngineMetrics
from engine.speculation import PROPOSERS
from engine.speculation.speculation import Speculation
from kvconnector.peer_process import PeerProcess
from tests.covering import covering
from tests.fakes.engine import drafters
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE
from tests.property.num_examples import num_requests
from tests.property.test_split_in_any_company import (
    Alone,
    Crowd,
    folder,
    make_system,
    patched,
)

__all__ = ["patched"]  # a fixture

NUM_DRAFTS = (1, 3, 5)
CASES = [(method, num_drafts) for method in PROPOSERS.names() for num_drafts in NUM_DRAFTS]
MAX_TOKENS = 60  # of an output in one process; a cold model soon repeats itself
MAX_SPLIT_TOKENS = 32
SMALL: dict[str, Any] = {"num_threads": 1}


def options_of(method: str, num_drafts: int) -> dict[str, Any]:
    return {
        **drafters.options_of(method, folder()),
        "num_speculative_tokens": num_drafts,
        "adaptive_speculation": False,  # so that it does not depend on the machine's speed
        **SMALL,
    }


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(SMALL)


@pytest.fixture(autouse=True)
def some_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the drafter read only some requests, as where no drafts pay."""
    draw, num_to_read = random.Random(9), Speculation.num_to_read

    def some(speculation: Speculation) -> int:
        return draw.choice([0, 1, ALL]) if speculation.drafter_reads else num_to_read(speculation)

    monkeypatch.setattr(Speculation, "num_to_read", some)


@pytest.mark.parametrize(("method", "num_drafts"), CASES)
@pytest.mark.timeout(0)
def test_in_one_process(
    method: str, num_drafts: int, alone: Alone, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(num_drafts)
    prompts, params = [], []
    for _ in range(num_requests(6 * len(CASES)) // len(CASES)):
        prompts.append([draw.randrange(3, 64) for _ in range(draw.choice([1, 7, 33, 120]))])
        params.append(
            SamplingParams(
                max_tokens=draw.randint(2, MAX_TOKENS),
                temperature=draw.choice([0.0, 0.0, 1.0]),
                seed=draw.randrange(2**31),
                ignore_eos=True,
                logprobs=1,
                repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            )
        )
    llm = LLM(
        str(folder()),
        block_size=BLOCK_SIZE,
        num_blocks=60,
        max_num_requests=6,
        max_num_batched_tokens=48,
        long_prefill_token_threshold=20,
        async_scheduling=draw.random() < 0.5,
        **options_of(method, num_drafts),
    )
    num_tokens = 0
    for found, prompt, own in zip(llm.generate(prompts, params), prompts, params, strict=True):
        expected = alone.complete(prompt, own)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs
        num_tokens += len(found.token_ids)
    record_property("tokens", num_tokens)
    record_drafts([llm.metrics()], record_property)


@pytest.mark.parametrize(
    ("dies", "method", "num_drafts"), covering([False, True], PROPOSERS.names(), NUM_DRAFTS)
)
@pytest.mark.timeout(0)
def test_in_a_split_system(
    method: str,
    num_drafts: int,
    dies: bool,
    alone: Alone,
    patched: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    draw = random.Random(num_drafts)
    num_left = num_requests(8 * len(CASES)) // len(CASES)
    num_tokens, num_kills, num_refused, metrics = 0, 0, 0, list[EngineMetrics]()
    while num_left > 0:
        num_now = min(num_left, 25)
        num_left -= num_now
        system = make_system(alone, options_of(method, num_drafts), draw)
        patched.setattr(
            PeerProcess, "has_ended", lambda peer, dead=system.dead: peer.engine_id in dead
        )
        crowd = Crowd(system, alone, draw.randrange(2**31), MAX_SPLIT_TOKENS)
        if not dies:
            patched.setattr(crowd, "_disturb", lambda: None)
        try:
            crowd.run(num_now)
            engines = [process.node.engine for process in system.by_id.values()]
            metrics += [engine.metrics() for engine in engines]
            system.close()
        finally:
            system.abandon()
        num_refused += crowd.check()
        num_tokens += sum(len(client.token_ids) for client, _ in crowd.asked)
        num_kills += crowd.num_kills
    record_property("tokens", num_tokens)
    record_property("nodes killed", num_kills)
    record_property("requests refused", num_refused)
    assert num_refused <= num_kills // 4
    record_drafts(metrics, record_property)


def record_drafts(
    metrics: Sequence[EngineMetrics], record_property: Callable[[str, object], None]
) -> None:
    """Record the numbers of drafts; assert that some were wrong, and if there were many, some
    right."""
    num_right = sum(one.accepted_drafts_total for one in metrics)
    num_drafts = sum(one.drafts_total for one in metrics)
    record_property("drafts", num_drafts)
    record_property("right drafts", num_right)
    assert num_right < num_drafts
    assert num_right or num_drafts < 300, "of few, none need be right"
