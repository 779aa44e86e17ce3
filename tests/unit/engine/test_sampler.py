"""Unit tests of the sampler: against numpy, against published vectors, and against its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.api.sampling_params import SamplingParams
from engine.core.request import Request
from engine.sampling.philox import WordTable, counter_words
from engine.sampling.sampler import TOP_VALUES
from tests.fakes.engine.engine_parts import make_request
from tests.fakes.engine.sampling import random_words, sample, scores

VOCAB_SIZE = 40


def request(seed: int, position: int = 0, **params: Any) -> Request:
    made = make_request("a", params=SamplingParams(**params), seed=seed)
    made.token_ids += [1] * position
    return made


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3


def allowed(logits: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution that one row is to be drawn from, by definition and one token at a time."""
    values = logits.double().numpy() / params.temperature
    weights = np.exp(values - values.max())
    best_first = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        for token in best_first[params.top_k :]:
            weights[token] = 0
    weights /= weights.sum()
    mass = 0.0
    for token in best_first:
        if mass >= params.top_p:
            weights[token] = 0
        mass += float(weights[token])
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


# ---------------------------------------------------------------- the counter-based words

# Random123's kat_vectors for philox4x32-10, where key is our seed and the upper half of the
# counter is 0 as ours is; ours are the first two of the four words of output.
#   philox4x32 10   00000000 00000000 00000000 00000000   00000000 00000000
#                   6627e8d5 e169c58d bc57ac4c 9b00dbd8


def test_the_words_are_those_of_the_published_philox_vector() -> None:
    assert random_words(0, 0) == [0x6627E8D5, 0xE169C58D]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 as the paper draws it: two S-boxes per round on 32-bit words, in numpy."""
    words = [np.uint64(word) for word in counter]
    k = [np.uint64(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        left, right = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        shift = np.uint64(32)
        words = [
            (right >> shift) ^ words[1] ^ k[0],
            right & low,
            (left >> shift) ^ words[3] ^ k[1],
            left & low,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return [int(word) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_our_second_philox_agrees_with_all_published_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert philox(counter, key) == expected


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_the_words_equal_those_of_that_second_philox_for_every_seed_and_position(
    seed: int, position: int
) -> None:
    key = seed % 2**64
    words = philox([position % 2**32, position >> 32, 0, 0], [key % 2**32, key >> 32])
    assert random_words(seed, position) == words[:2]


@pytest.mark.medium
def test_words_of_one_seed_and_of_neighbouring_seeds_fill_their_range_evenly() -> None:
    for words in (
        [random_words(7, position) for position in range(4000)],
        [random_words(seed, 0) for seed in range(4000)],
    ):
        for column in np.array(words).T:
            counts = np.histogram(column, bins=20, range=(0, 2**32))[0]
            chi_square = float(((counts - 200.0) ** 2 / 200.0).sum())
            assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand; fixed seeds


@pytest.mark.medium
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60) | st.just(2**40)), max_size=30))
def test_words_computed_ahead_are_those_computed_alone(
    asked: list[tuple[int, int]],
) -> None:
    """Rows that run on, go back, jump, and change hands."""
    table = WordTable(4)
    seeds = np.arange(4, dtype=np.uint64)
    for number, (row, position) in enumerate(asked):
        if number % 7 == 6:
            table.clear(row)
            seeds[row] += np.uint64(10)
        rows = np.array([row, (row + 1) % 4])
        positions = np.array([position, number])
        taken = table.words_at(rows, seeds[rows], positions)
        np.testing.assert_array_equal(taken, counter_words(seeds[rows], positions))


# ---------------------------------------------------------------- the choice of a token


def test_temperature_zero_takes_the_most_probable_token() -> None:
    logits = random_logits(1, 5)
    requests = [request(seed, temperature=0) for seed in range(5)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


def test_the_first_of_equal_logits_is_taken_when_greedy() -> None:
    assert sample(torch.zeros(1, 8), [request(0, temperature=0)]) == [0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-7])
def test_a_temperature_next_to_zero_is_greedy_and_not_a_nan(temperature: float) -> None:
    logits = random_logits(2)
    assert sample(logits, [request(3, temperature=temperature)]) == logits.argmax(-1).tolist()


@given(
    st.integers(0, 10_000),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 7, VOCAB_SIZE, 10 * VOCAB_SIZE]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
)
def test_a_draw_is_the_best_score_of_what_the_filters_keep(
    logits_seed: int, seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(logits_seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    chosen = make_request("a", params=params, seed=seed)
    kept = np.where(allowed(logits[0], params) > 0, scores(logits[0], temperature, seed), -np.inf)
    assert sample(logits, [chosen]) == [kept.argmax()]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0}])
def test_the_smallest_filters_leave_exactly_the_most_probable_token(
    params: dict[str, Any],
) -> None:
    logits = random_logits(4, 20)
    requests = [request(seed, **params) for seed in range(20)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}])
def test_equally_probable_tokens_stay_or_go_together(params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.4, 0.25, 0.25, 0.1]]).log()
    drawn = {token for seed in range(300) for token in sample(logits, [request(seed, **params)])}
    assert drawn == {0, 1, 2}


@pytest.mark.medium
def test_top_p_looks_at_the_whole_vocabulary_where_the_top_does_not_hold_enough() -> None:
    num_tokens = 3 * TOP_VALUES[-1]
    logits = torch.linspace(0.0, 0.5, num_tokens).unsqueeze(0)  # nearly equal probabilities
    probabilities = logits.double().softmax(-1).flip(-1).cumsum(-1)[0]
    num_kept = int((probabilities < 0.9).sum()) + 1
    assert num_kept > TOP_VALUES[-1]
    requests = [request(seed, top_p=0.9) for seed in range(3000)]
    drawn = sample(logits.expand(len(requests), -1), requests)
    assert min(drawn) >= num_tokens - num_kept
    assert min(drawn) < num_tokens - num_kept + num_tokens // 50  # the edge is reached, too


def test_top_p_keeps_the_token_that_crosses_the_threshold_and_none_after_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = {token for seed in range(300) for token in sample(logits, [request(seed, top_p=0.6)])}
    assert drawn == {0, 1}


def test_a_token_that_is_forbidden_by_an_infinite_logit_is_never_drawn() -> None:
    logits = torch.zeros(1, 6)
    logits[0, ::2] = -torch.inf
    drawn = {t for seed in range(200) for t in sample(logits, [request(seed)])}
    assert drawn == {1, 3, 5}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_k": 6}, {"top_p": 0.8}])
def test_many_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws = 3000
    logits = random_logits(5) / 3
    requests = [request(11, position, **params) for position in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1), requests)
    weights = allowed(logits[0], requests[0].sampling_params)
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert counts[weights == 0].sum() == 0
    expected = weights[weights > 0] * num_draws
    chi_square = float(((counts[weights > 0] - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # four sigma; the seed is fixed


# ---------------------------------------------------------------- nothing but seed and position


def test_a_request_gets_the_same_token_whatever_shares_its_batch_and_wherever_it_stands() -> None:
    logits = random_logits(6, 12)
    requests = [
        request(
            seed,
            position=seed % 4,
            temperature=(0.0, 0.8, 1.3)[seed % 3],
            top_k=(0, 5)[seed % 2],
            top_p=(1.0, 0.7)[seed // 2 % 2],
        )
        for seed in range(12)
    ]
    alone = [sample(logits[i : i + 1], [requests[i]])[0] for i in range(12)]
    assert sample(logits, requests) == alone
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    assert sample(logits[order], [requests[i] for i in order]) == [alone[i] for i in order]
    assert len(set(alone)) > 3


def test_another_position_and_another_seed_give_other_draws() -> None:
    logits = torch.zeros(1, 10_000)
    by_position = {sample(logits, [request(1, position)])[0] for position in range(20)}
    by_seed = {sample(logits, [request(seed)])[0] for seed in range(20)}
    assert len(by_position) > 17
    assert len(by_seed) > 17


def test_sampling_does_not_touch_the_logits_or_torchs_own_generator() -> None:
    logits = random_logits(7, 2)
    before, state = logits.clone(), torch.get_rng_state()
    sample(logits, [request(0, top_k=3), request(1, top_p=0.5)])
    assert torch.equal(logits, before)
    assert torch.equal(torch.get_rng_state(), state)
