"""Contract of proposers: randomly kept drafts do not change the distribution of outputs.

Each position of one prompt's outputs is compared with outputs without drafts and with other seeds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.speculation import PROPOSERS
from tests.fakes.engine import drafters
from tests.property.num_examples import num_draws
from tests.property.test_split_in_any_company import folder

pytestmark = pytest.mark.medium

PROMPT = [5, 9, 5, 9, 5, 9, 5]  # in which something can be looked up
MAX_TOKENS = 4
LEAST_EXPECTED = 10  # of a token; those that came less often count as one
STEPS = {"max_num_requests": 64, "max_num_batched_tokens": 512, "num_threads": 1}


def outputs_of(num: int, first_seed: int, **options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(str(folder()), num_blocks=400, **STEPS, **options)
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=1.1, top_p=0.9, seed=first_seed + index,
            frequency_penalty=0.5, ignore_eos=True,
        )
        for index in range(num)
    ]  # fmt: skip
    return [one.token_ids for one in llm.generate([PROMPT] * num, params)], llm


def p_value_of_two(one: Counter[int], other: Counter[int]) -> float:
    """Return the p-value of a chi-square test that two equally large samples are alike."""
    pairs = [(one[key], other[key]) for key in one.keys() | other.keys()]
    rare = [pair for pair in pairs if sum(pair) < 2 * LEAST_EXPECTED]
    pairs = [pair for pair in pairs if sum(pair) >= 2 * LEAST_EXPECTED]
    if rare:
        pairs.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    halves = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


@pytest.fixture(scope="module", params=[1000, pytest.param(3000, marks=pytest.mark.thorough)])
def plain(request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    return outputs_of(num_draws(request.param), 10**9)[0]


@pytest.mark.parametrize("method", PROPOSERS.names())
def test_outputs_have_the_distribution_of_those_without_drafts(
    method: str, plain: list[tuple[int, ...]], record_property: Any
) -> None:
    found, llm = outputs_of(
        len(plain),
        1,
        draft_acceptance="rejection",
        num_speculative_tokens=3,
        adaptive_speculation=False,
        **drafters.options_of(method, folder()),
    )
    metrics = llm.metrics()
    assert 0 < metrics.accepted_drafts_total < metrics.drafts_total
    for place in range(MAX_TOKENS):
        ours, theirs = (Counter(one[place] for one in outputs) for outputs in (found, plain))
        probability = p_value_of_two(ours, theirs)
        record_property(f"p of token {place + 1}", f"{probability:.3f}")
        assert probability > 0.001
    # A token and the next one: what is drawn in a draft's place depends on what came before.
    pairs = [Counter(one[1] * 64 + one[2] for one in outputs) for outputs in (found, plain)]
    assert p_value_of_two(*pairs) > 0.001
