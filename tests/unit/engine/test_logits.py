"""Unit tests of penalties, biases and bans: against numpy in float64, and against their batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.sampling_params import SamplingParams
from engine.core.request import Request
from tests.fakes.engine.sampling import adjust, sample, scores

VOCAB_SIZE = 24
EOS = 9


def make(prompt: list[int], output: list[int], *, seed: int = 0, **params: Any) -> Request:
    request = Request.create(
        "a",
        prompt,
        SamplingParams(**params),
        seed=seed,
        eos_token_ids=frozenset({EOS, VOCAB_SIZE + 5}),  # some checkpoints name one too many
        max_model_len=10_000,
    )
    request.token_ids += output
    return request


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3


def adjusted_by_definition(logits: torch.Tensor, request: Request) -> npt.NDArray[np.float64]:
    """One token at a time, in the order that SamplingParams promises."""
    params, output = request.sampling_params, request.output_token_ids
    values = logits.double().numpy().copy()
    for token in range(VOCAB_SIZE):
        if token in request.token_ids:
            scale = params.repetition_penalty
            values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
        values[token] -= params.presence_penalty * (token in output)
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] += dict(params.logit_bias).get(token, 0.0)
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not allowed or token in params.banned_token_ids:
            values[token] = -np.inf
    if len(output) < params.min_tokens:
        left = values.copy()
        for token in range(VOCAB_SIZE):
            if token == EOS or token in params.stop_token_ids:
                left[token] = -np.inf
        values = left if np.isfinite(left).any() else values
    return values


def token_by_definition(logits: torch.Tensor, request: Request) -> int:
    """Return the greedy token, or the best score among what top-k, top-p and min-p keep."""
    params = request.sampling_params
    values = adjusted_by_definition(logits, request)
    if params.temperature == 0:
        return int(values.argmax())
    weights = np.exp((values - values.max()) / params.temperature)
    best_first = sorted(range(VOCAB_SIZE), key=lambda token: (-weights[token], token))
    if params.top_k:
        weights[best_first[params.top_k :]] = 0
    weights /= weights.sum()
    mass = 0.0
    for token in best_first:
        mass, weights[token] = mass + weights[token], weights[token] * (mass < params.top_p)
    weights[weights < params.min_p * weights.max()] = 0
    position = request.num_output_tokens
    found = scores(torch.from_numpy(values), params.temperature, request.seed, position)
    return int(np.where(weights > 0, found, -np.inf).argmax())


tokens = st.integers(0, VOCAB_SIZE - 1)
some_tokens = st.lists(tokens, max_size=4, unique=True)
requests = st.builds(
    make,
    st.lists(tokens, min_size=1, max_size=8),
    st.lists(tokens, max_size=8),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.8, -0.4]),
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5), max_size=3),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=5, max_size=9, unique=True),
    banned_token_ids=some_tokens,
    stop_token_ids=some_tokens,
    min_tokens=st.sampled_from([0, 0, 4, 20]),
)


@given(st.integers(0, 10_000), requests)
def test_adjusted_logits_are_those_of_the_definition(seed: int, request: Request) -> None:
    logits = random_logits(seed)
    found = adjust(logits, [request])[0].numpy()
    np.testing.assert_allclose(found, adjusted_by_definition(logits[0], request), rtol=1e-12)


@pytest.mark.medium
@settings(max_examples=200)
@given(st.integers(0, 10_000), st.lists(requests, min_size=1, max_size=5))
def test_tokens_are_those_of_the_definition_in_any_batch(seed: int, batch: list[Request]) -> None:
    logits = random_logits(seed, len(batch))
    before = logits.clone()
    found = sample(logits, batch)
    assert found == [token_by_definition(row, r) for row, r in zip(logits, batch, strict=True)]
    assert found[::-1] == sample(logits.flip(0), batch[::-1])
    assert torch.equal(logits, before)


def test_requests_without_a_feature_get_what_they_get_alone_next_to_those_with_one() -> None:
    logits = random_logits(3, 6)
    batch = [make([1], [2], seed=i, temperature=i % 2) for i in range(6)]
    alone = sample(logits, batch)
    for i in (0, 3, 5):
        batch[i] = make([1], [2], seed=i, temperature=i % 2, logit_bias=((7, 100.0),))
    assert sample(logits, batch) == [7 if i in (0, 3, 5) else alone[i] for i in range(6)]


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 6, "min_p": 0.1},
        {"top_p": 0.7, "top_k": 9, "temperature": 1.4},
        {"min_p": 0.05, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": ((4, 2.0),)},
    ],
)
def test_many_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    num_draws = 3000
    logits = random_logits(5) / 3
    batch = [make([1, 2], [3, 4], seed=seed, **params) for seed in range(num_draws)]
    counts = np.bincount(sample(logits.expand(num_draws, -1), batch), minlength=VOCAB_SIZE)
    temperature = batch[0].sampling_params.temperature
    values = adjusted_by_definition(logits[0], batch[0])
    weights = np.exp((values - values.max()) / temperature)
    order = np.argsort(-weights)
    weights[order[params.get("top_k") or VOCAB_SIZE :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.get("top_p", 1.0)]] = 0
    weights[weights < params.get("min_p", 0.0) * weights.max()] = 0
    expected = num_draws * weights / weights.sum()
    left = weights > 0
    assert counts[~left].sum() == 0
    chi_square = float(((counts[left] - expected[left]) ** 2 / expected[left]).sum())
    degrees = int(left.sum()) - 1
    assert chi_square <= degrees + 4 * (2 * degrees) ** 0.5  # four sigma; the seeds are fixed


# ---------------------------------------------------------------- corners


def test_min_p_of_one_leaves_the_best_and_its_equals() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0]])
    drawn = {t for seed in range(100) for t in sample(logits, [make([1], [], seed=seed, min_p=1)])}
    assert drawn == {0, 2}


@pytest.mark.parametrize("num_output_tokens", [0, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_not_drawn_before_min_tokens(
    num_output_tokens: int, temperature: float
) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [EOS, 5]] = 60.0
    output = [1] * num_output_tokens
    request = make([1], output, temperature=temperature, min_tokens=3, stop_token_ids=(5,))
    [token_id] = sample(logits, [request])
    assert (token_id in (5, EOS)) == (num_output_tokens == 3)


def test_min_tokens_gives_way_where_nothing_but_end_tokens_is_allowed() -> None:
    request = make([1], [], min_tokens=3, allowed_token_ids=(EOS,))
    assert sample(torch.zeros(1, VOCAB_SIZE), [request]) == [EOS]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e308])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_an_extreme_penalty_makes_no_nan(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[-1.0, 0.0, 1.0, 2.0, -3.0]])
    request = make([0, 1, 2], [], repetition_penalty=penalty, temperature=temperature, seed=3)
    [token_id] = sample(logits, [request])
    if temperature < 1:
        assert token_id == (2 if penalty < 1 else 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_banned_does_not_take_its_batch_down(temperature: float) -> None:
    """Survive a row with all tokens banned, which the router refuses already."""
    nothing = make([1], [], temperature=temperature, banned_token_ids=tuple(range(VOCAB_SIZE)))
    logits = random_logits(1, 2)
    found = sample(logits, [nothing, make([1], [], temperature=0)])
    assert 0 <= found[0] < VOCAB_SIZE
    assert found[1] == int(logits[1].argmax())
