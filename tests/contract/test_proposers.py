"""Contract of every proposer: its drafts, right or wrong, change no token."""

from __future__ import annotations

import pytest

from baton.api.outputs import Completion
from baton.engine_config import SPECULATIVE_METHODS
from engine import LLM
from engine.speculation import PROPOSERS
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.drafters import options_of
from tests.unit.engine.test_several_samples import REQUESTS, SMALL

pytestmark = pytest.mark.medium


def test_the_option_names_all_of_them() -> None:
    assert ("none", *PROPOSERS.names()) == SPECULATIVE_METHODS


@pytest.fixture(scope="module")
def plain() -> tuple[list[Completion], int]:
    llm = LLM(str(DEMO_MODEL), **SMALL)
    return llm.generate(*REQUESTS), llm.engine.num_steps


@pytest.mark.parametrize(
    ("num_drafts", "asynchronous", "adaptive"),
    [
        (1, False, False),
        (3, True, False),
        pytest.param(5, False, False, marks=pytest.mark.thorough),
        (5, True, True),
    ],
)
@pytest.mark.parametrize("method", PROPOSERS.names())
def test_speculation_changes_no_token(
    method: str,
    num_drafts: int,
    asynchronous: bool,
    adaptive: bool,
    plain: tuple[list[Completion], int],
) -> None:
    expected, num_steps = plain
    llm = LLM(
        str(DEMO_MODEL),
        async_scheduling=asynchronous,
        num_speculative_tokens=num_drafts,
        adaptive_speculation=adaptive,
        **options_of(method, DEMO_MODEL),
        **SMALL,
    )
    found = llm.generate(*REQUESTS)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        assert (mine.text, mine.logprobs) == (other.text, other.logprobs)
        assert mine.prompt_logprobs == other.prompt_logprobs
    metrics = llm.metrics()
    assert metrics.preemptions_total > 0
    assert metrics.blocks_free == SMALL["num_blocks"]
    if adaptive:  # how many drafts pay depends on the machine
        return
    assert 0 < metrics.accepted_drafts_total < metrics.drafts_total
    assert len(metrics.accepted_drafts_by_place) <= num_drafts
    assert 1 < metrics.mean_acceptance_length < 1 + num_drafts
    if not asynchronous:
        assert llm.engine.num_steps < num_steps
