"""The sampler over a vocabulary of some thousands, against the distribution by definition.

In float64 and by sorting everything; what is drawn must follow it, and never leave what it keeps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.api.sampling_params import SamplingParams
from engine.core.request import Request
from engine.sampling.sampler import TOP_VALUES
from tests.fakes.engine.engine_parts import make_request
from tests.fakes.engine.sampling import sample, scores

VOCAB_SIZE = 2 * TOP_VALUES[-1] + 33  # no whole number of vector registers
NUM_DRAWS = 4_000
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 500},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 60, "top_p": 0.8},
    {"top_k": 60, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.03, "temperature": 1.3},
]


def make_logits(scale: float, *, rounded: bool = False) -> torch.Tensor:
    """One row; rounded as a bfloat16 model's are, which makes many equal."""
    generator = torch.Generator().manual_seed(int(10 * scale))
    logits = torch.randn(1, VOCAB_SIZE, generator=generator) * scale
    return logits.bfloat16().float() if rounded else logits


def distribution(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    """Return a row's distribution after top-k, top-p and min-p; ties stay or go together."""
    values = logits.double().numpy() / params.temperature
    weights: npt.NDArray[np.float64] = np.exp(values - values.max())
    kept = np.sort(weights)[::-1][: params.top_k or None]
    before = np.cumsum(kept) - kept
    kept = kept[: max(1, int((before < params.top_p * kept.sum()).sum()))]
    weights[weights < max(kept[-1], params.min_p)] = 0
    weights /= weights.sum()
    return weights


def draw(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Tokens of one request's first ``NUM_DRAWS`` output positions, in batches."""
    tokens: list[int] = []
    for start in range(0, NUM_DRAWS, 200):
        batch = []
        for position in range(start, start + 200):
            batch.append(make_request("a", 1, params=params, seed=17))
            batch[-1].token_ids += [1] * position
        tokens += sample(logits.expand(200, -1), batch)
    return np.array(tokens)


def assert_follows(tokens: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Chi-square below four sigma, tokens too rare for it taken together; and nothing else drawn.

    The seeds are fixed.
    """
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    expected = expected * len(tokens)
    often = expected >= 5
    found = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    chi_square = float(((found - wanted) ** 2 / wanted).sum())
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.medium
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits, sampling_params = make_logits(3.0), SamplingParams(**params)
    expected = distribution(logits[0], sampling_params)
    assert_follows(draw(logits, sampling_params), expected)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_draw_is_the_best_score_of_exactly_what_is_kept(scale: float, rounded: bool) -> None:
    """Every draw of every filter, in one batch; so it is the one without filters where kept."""
    logits = make_logits(scale, rounded=rounded)
    requests: list[Request] = []
    expected: list[int] = []
    for number, params in enumerate(FILTERS * 20):
        requests.append(make_request("a", params=SamplingParams(**params), seed=number))
        sampling_params = requests[-1].sampling_params
        weights = distribution(logits[0], sampling_params)
        found = scores(logits[0], sampling_params.temperature, number)
        expected.append(int(np.where(weights > 0, found, -np.inf).argmax()))
    assert sample(logits.expand(len(requests), -1), requests) == expected


@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_filters_do_not_change_a_draw_that_they_keep(params: dict[str, Any]) -> None:
    logits = make_logits(3.0)
    keeps = distribution(logits[0], SamplingParams(**params)) > 0
    free = [make_request("a", seed=seed) for seed in range(500)]
    filtered = [make_request("a", params=SamplingParams(**params), seed=n) for n in range(500)]
    pairs = zip(
        sample(logits.expand(500, -1), free),
        sample(logits.expand(500, -1), filtered),
        strict=True,
    )
    same = [free_token == token for free_token, token in pairs if keeps[free_token]]
    assert all(same)
    assert 200 < len(same) < 500


@pytest.mark.medium
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 1000])
def test_every_token_of_a_small_vocabulary_can_be_drawn_and_no_other(num_tokens: int) -> None:
    requests = [make_request("a", seed=seed) for seed in range(20 * num_tokens)]
    drawn = sample(torch.zeros(len(requests), num_tokens), requests)
    assert set(drawn) <= set(range(num_tokens))
    assert len(set(drawn)) > 0.99 * num_tokens


def test_a_request_gets_the_same_token_in_every_company() -> None:
    """Alone, among its like, among all others: bit for bit the same logits, the same token."""
    logits = torch.cat([make_logits(scale) for scale in (0.5, 1.0, 2.0, 4.0)]).repeat(
        len(FILTERS), 1
    )
    requests = [
        make_request("a", params=SamplingParams(**params), seed=31 * row + copy)
        for row, params in enumerate(FILTERS)
        for copy in range(4)
    ]
    together = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    assert together == alone
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [requests[i] for i in order]) == [alone[i] for i in order]
