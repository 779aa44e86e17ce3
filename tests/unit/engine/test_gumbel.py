"""Gumbel-max draws: the noise by definition and as randomness, the choice by definition."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.gumbel import (
    CHUNK_ELEMENTS,
    NO_TOKEN,
    best_scores,
    device_hashes,
    device_scores,
    draw,
    gumbel,
    noise_hashes,
)
from engine.sampling.philox import counter_words

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
WORD = st.integers(0, 2**32 - 1)


def words(num_keys: int, seed: int = 0) -> Words:
    """Keys of the first output position of so many seeds."""
    seeds = np.arange(num_keys, dtype=np.uint64) + np.uint64(1000 * seed)
    return counter_words(seeds, np.zeros(num_keys, dtype=np.int64))


def hash_by_definition(token_id: int, first: int, second: int) -> int:
    """One hash in Python's integers, which do not wrap."""
    word = (token_id * 0x9E3779B9 + first) % 2**32
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word ^= second
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def scores(
    logits: torch.Tensor, temperatures: npt.NDArray[np.float64], keys: Words
) -> torch.Tensor:
    """Compute every token's score by definition, in float64."""
    token_ids = np.arange(logits.shape[1])
    noise = gumbel(noise_hashes(keys[:, None], token_ids))
    return logits.double() + torch.from_numpy(temperatures[:, None] * noise)


def chi_square(values: Words, num_bins: int = 256) -> float:
    """Return chi-square of the words' upper bits against an even spread, in sigmas."""
    counts = np.bincount((values.reshape(-1) // (2**32 // num_bins)), minlength=num_bins)
    expected = values.size / num_bins
    found = float(((counts - expected) ** 2 / expected).sum())
    degrees = float(num_bins - 1)
    return (found - degrees) / math.sqrt(2 * degrees)


# ---------------------------------------------------------------- the noise


@given(st.integers(0, 2**31 - 1), WORD, WORD)
def test_a_hash_is_that_of_the_definition(token_id: int, first: int, second: int) -> None:
    keys = np.array([[first, second]], dtype=np.uint32)
    expected = hash_by_definition(token_id, first, second)
    assert noise_hashes(keys, np.array([token_id])).tolist() == [expected]


def test_different_tokens_never_share_a_hash() -> None:
    for row in noise_hashes(words(4)[:, None], np.arange(200_000)):
        assert len(np.unique(row)) == 200_000


def test_hashes_fill_their_range_evenly_over_tokens_positions_and_seeds() -> None:
    over_tokens = noise_hashes(words(1)[:, None], np.arange(200_000))
    positions = counter_words(np.full(200_000, 7, dtype=np.uint64), np.arange(200_000))
    over_positions = noise_hashes(positions, np.array([3]))
    over_seeds = noise_hashes(words(200_000), np.array([3]))
    for hashes in (over_tokens, over_positions, over_seeds):
        assert abs(chi_square(hashes)) < 4  # the seeds are fixed
        assert abs(chi_square(hashes << np.uint32(20))) < 4  # and their lower bits


@pytest.mark.parametrize("distance", [1, 2, 64, 1024])
def test_noise_of_neighbours_is_independent(distance: int) -> None:
    """Pairs of neighbouring tokens, positions and seeds: no correlation, and all pairs of bins."""
    over_tokens = noise_hashes(words(50)[:, None], np.arange(4096))
    positions = counter_words(np.full(4096, 7, dtype=np.uint64), np.arange(4096))
    over_positions = noise_hashes(positions, np.arange(50)[:, None])
    over_seeds = noise_hashes(words(4096), np.arange(50)[:, None])
    for hashes in (over_tokens, over_positions, over_seeds):
        left, right = hashes[:, :-distance], hashes[:, distance:]
        correlation = np.corrcoef(gumbel(left).reshape(-1), gumbel(right).reshape(-1))[0, 1]
        assert abs(correlation) < 4 / left.size**0.5
        pairs = (left >> np.uint32(28) << np.uint32(28)) | (right >> np.uint32(28) << np.uint32(24))
        assert abs(chi_square(pairs)) < 4


def test_noise_follows_gumbels_distribution() -> None:
    noise = gumbel(noise_hashes(words(40)[:, None], np.arange(10_000))).reshape(-1)
    error = noise.std() / len(noise) ** 0.5
    assert abs(noise.mean() - 0.5772156649) < 4 * error
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    for quantile in (0.01, 0.5, 0.99, 0.9999):
        found = float((noise < -math.log(-math.log(quantile))).mean())
        assert abs(found - quantile) < 4 * (quantile * (1 - quantile) / len(noise)) ** 0.5


def test_the_largest_and_the_smallest_noise_are_numbers() -> None:
    smallest, largest = gumbel(np.array([2**32 - 1, 0], dtype=np.uint32))
    assert smallest == pytest.approx(-math.log(33 * math.log(2)))
    assert largest == pytest.approx(33 * math.log(2))


# ---------------------------------------------------------------- the choice


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 2, 7, 300, 5000]),
    st.sampled_from([1e-6, 0.3, 1.0, 30.0, 1e30]),
    st.sampled_from([0.0, 0.01, 3.0, 1e4]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_draw_is_the_best_score(
    seed: int, vocab_size: int, temperature: float, scale: float, dtype: torch.dtype
) -> None:
    """Compare with scores of all tokens in float64: the bounds leave no token out."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(20, vocab_size, generator=generator) * scale).to(dtype)
    logits[:, 1::3] = -torch.inf
    temperatures = np.full(20, temperature)
    keys = words(20, seed)
    expected = scores(logits, temperatures, keys).argmax(-1).tolist()
    assert draw(logits, temperatures, keys).tolist() == expected


def test_rows_in_several_chunks_are_drawn_as_alone() -> None:
    vocab_size = CHUNK_ELEMENTS // 3
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0))
    temperatures, keys = np.linspace(0.5, 2, 8), words(8)
    alone = [draw(logits[i : i + 1], temperatures[i : i + 1], keys[i : i + 1]) for i in range(8)]
    assert draw(logits, temperatures, keys).tolist() == np.concatenate(alone).tolist()
    assert len(set(np.concatenate(alone).tolist())) > 4


def test_float64_logits_beyond_float32_are_drawn() -> None:
    logits = torch.full((1, 5), -1e300, dtype=torch.float64)
    logits[0, 3] = 1e300
    assert draw(logits, np.ones(1), words(1)).tolist() == [3]


@pytest.mark.parametrize(
    ("value", "token_id"), [(-math.inf, 0), (math.nan, NO_TOKEN), (math.inf, NO_TOKEN)]
)
def test_a_row_without_a_finite_best_leaves_others_alone(value: float, token_id: int) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = draw(logits, np.ones(3), words(3)).tolist()
    logits[1] = value
    drawn = draw(logits, np.ones(3), words(3)).tolist()
    assert drawn == [expected[0], token_id, expected[2]]


def test_a_row_without_a_candidate_gives_no_token() -> None:
    rows, token_ids, logits = np.array([0, 2, 2]), np.array([4, 6, 7]), np.array([1.0, 0.0, 90.0])
    assert best_scores(3, rows, token_ids, logits, np.ones(3), words(3)).tolist() == [
        4,
        NO_TOKEN,
        7,
    ]


def test_flat_logits_give_every_token_as_often() -> None:
    num_draws, vocab_size = 60_000, 60
    drawn = draw(torch.zeros(num_draws, vocab_size), np.ones(num_draws), words(num_draws))
    counts = np.bincount(drawn, minlength=vocab_size)
    found = float(((counts - 1000) ** 2 / 1000).sum())
    assert found < 59 + 4 * (2 * 59) ** 0.5


@pytest.mark.medium
def test_noise_on_the_logits_hardly_ever_changes_a_draw() -> None:
    """A draw changes where the two best scores are closer than the noise moves them apart.

    That distance has a density of at most 1 / temperature at 0, and noise on logits below 6 moves
    it by less than 2 * 6 * 4 * 3e-7 < 2e-5 at four sigma: in 200,000 draws at most 4 changes are
    expected, and 16 or more have a probability below 1e-5. The seeds are fixed.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 1000, generator=generator)
    rounded = logits + logits * torch.randn(logits.shape, generator=generator) * 3e-7
    changed = 0
    for seed in range(100):
        keys = words(2000, 2 * seed)
        drawn = draw(logits, np.ones(2000), keys)
        changed += int((drawn != draw(rounded, np.ones(2000), keys)).sum())
    assert changed < 16


# ---------------------------------------------------------------- as on a GPU


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=5))
def test_a_devices_hashes_are_the_hosts_bit_for_bit(pairs: list[tuple[int, int]]) -> None:
    keys = np.array(pairs, dtype=np.uint32)
    found = device_hashes(keys, 3000, torch.device("cpu")).numpy().view(np.uint32)
    np.testing.assert_array_equal(found, noise_hashes(keys[:, None], np.arange(3000)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_devices_scores_are_the_hosts(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, ::2] = -torch.inf
    temperatures, keys = np.linspace(0.1, 3, 50), words(50)
    found, expected = device_scores(logits, temperatures, keys), scores(logits, temperatures, keys)
    assert found.dtype == dtype
    # Hashes next to 2**32 have the least noise, and in float32 the least digits: none of them wins.
    wins = expected > logits.double() - torch.from_numpy(temperatures[:, None])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double()[wins], expected[wins], atol=tolerance, rtol=1e-6)
    assert found.argmax(-1).tolist() == draw(logits, temperatures, keys).tolist()
