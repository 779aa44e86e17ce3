"""Contract of every proposer in a split system: as many drafts are right as in one process.

The prefill node drafts first, and the decode node's first step verifies its drafts; a drafter's KV
arrives with the model's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.core.outputs import SchedulerOutput
from engine.engine import Engine
from engine.speculation import PROPOSERS
from tests.fakes.engine import drafters
from tests.fakes.handoff.handoff_cluster import BLOCK_SIZE, Cluster
from tests.property.test_split_in_any_company import Alone, folder

pytestmark = pytest.mark.medium

NUM_REQUESTS, NUM_DRAFTS, MAX_TOKENS = 6, 3, 24
STEPS = {"max_num_requests": 4, "max_num_batched_tokens": 12, "long_prefill_token_threshold": 5}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """The last prompt has every token: whatever comes, a look-up finds it."""
    draw = random.Random(4)
    lengths = [*(draw.choice([1, 6, 13, 30]) for _ in range(NUM_REQUESTS - 1)), 64]
    return [
        (
            draw.sample(range(64), length),
            SamplingParams(
                max_tokens=MAX_TOKENS, temperature=index % 2, seed=index, ignore_eos=True
            ),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("method", PROPOSERS.names())
def test_as_many_drafts_are_right_as_in_one_process(
    method: str, record_property: Callable[[str, object], None]
) -> None:
    options: dict[str, Any] = {
        **drafters.options_of(method, folder()),
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive_speculation": False,
        "prefix_cache": False,
        "num_threads": 1,
    }
    llm = LLM(str(folder()), block_size=BLOCK_SIZE, num_blocks=300, **STEPS, **options)
    cluster = Cluster(folder(), Alone({"num_threads": 1}).kv, 300, engine_options=options)
    first_steps = note_first_steps(cluster.d_engine)
    for index, (prompt, params) in enumerate(requests()):
        [expected] = llm.generate([prompt], params)
        cluster.place(f"r{index}", 1, prompt, params)
        cluster.settle()
        attempt = cluster.attempts[f"r{index}", 1]
        assert tuple(attempt.tokens[place] for place in range(MAX_TOKENS)) == expected.token_ids
    mine, theirs = llm.metrics(), cluster.d_engine.metrics()
    assert mine.accepted_drafts_total > 0
    # A bit of a sum may fall otherwise where prompts are cut otherwise.
    assert theirs.draft_steps_total == pytest.approx(mine.draft_steps_total, rel=0.01)
    assert theirs.drafts_total == pytest.approx(mine.drafts_total, rel=0.01)
    assert theirs.mean_acceptance_length == pytest.approx(mine.mean_acceptance_length, rel=0.01)
    record_property("mean acceptance length, one process", f"{mine.mean_acceptance_length:.4f}")
    record_property("mean acceptance length, split", f"{theirs.mean_acceptance_length:.4f}")
    unit_bytes = cluster.d_engine.kv_memory.manifest.unit_bytes(0)
    for index, (prompt, _) in enumerate(requests()):
        name = f"r{index}"
        receipt = cluster.receipts[name]
        num_blocks = -(-len(prompt) // BLOCK_SIZE)  # none for drafts
        assert receipt.push.num_blocks == num_blocks
        assert receipt.push.num_bytes == num_blocks * unit_bytes
        if method != "ngram":  # which may find nothing to draft
            assert receipt.num_prompt_tokens_computed == 0
            assert first_steps[name] == (1, NUM_DRAFTS), "the first step verifies drafts"
    assert first_steps[f"r{NUM_REQUESTS - 1}"] == (1, NUM_DRAFTS)
    assert cluster.d_engine.metrics().blocks_free == 300
    assert cluster.p.engine.metrics().blocks_free == 300


def note_first_steps(engine: Engine) -> dict[str, tuple[int, int]]:
    """Count the known tokens and the drafts in each request's first step, by request id."""
    found: dict[str, tuple[int, int]] = {}
    schedule = engine.schedule

    def noting() -> SchedulerOutput:
        scheduled = schedule()
        for item in scheduled.scheduled:
            num_drafts = len(item.draft_token_ids)
            first = (item.num_scheduled_tokens - num_drafts, num_drafts)
            found.setdefault(item.request.request_id, first)
        return scheduled

    engine.schedule = noting  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("method", ["draft_model", "eagle", "mtp"])
def test_a_hand_off_grows_by_the_drafters_layers(method: str) -> None:
    plain = LLM(str(folder()), num_threads=1, num_blocks=8)
    options = drafters.options_of(method, folder())
    drafting = LLM(str(folder()), num_threads=1, num_blocks=8, **options)
    num_layers = plain.engine.model_config.num_layers
    num_own = 2 if method == "draft_model" else 1
    one, other = (llm.engine.kv_memory.manifest.unit_bytes(0) for llm in (plain, drafting))
    assert other / one == (num_layers + num_own) / num_layers
    assert drafting.engine.compatibility["drafter"].startswith(method)
    assert "drafter" not in plain.engine.compatibility
