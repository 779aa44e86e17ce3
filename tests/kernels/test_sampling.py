"""The Triton sampler draws the tokens that the CPU sampler draws, from the same distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.sampling.sampler
from baton_kernels.triton.sampling.tokens import DEFAULT_K, GROUP, MOST, PART, SEARCH_BLOCK
from engine.sampling.device_sampling import sample_on_device, upload_parameters
from engine.sampling.gumbel import NO_TOKEN, noise_hashes
from engine.sampling.philox import counter_words
from engine.sampling.sampling_input import PARAMETERS
from tests.kernels.conftest import DEVICE
from tests.kernels.poison import poisoned_memory as poisoned_memory

pytestmark = pytest.mark.large

Parameters = npt.NDArray[np.void]
TEMPERATURES, TOP_KS = [0.0, 1e-6, 0.3, 1.0, 1.7], [0, 1, 2, 7, 40, 10**6]
TOP_PS, MIN_PS = [1.0, 0.99, 0.9, 0.5, 1e-6], [0.0, 0.0, 0.02, 0.3, 1.0]


def parameters(num_rows: int, **columns: object) -> Parameters:
    """Rows that filter nothing, but for what ``columns`` say."""
    rows = np.zeros(num_rows, dtype=PARAMETERS)
    rows["temperature"] = rows["top_p"] = 1
    for name, values in columns.items():
        rows[name] = values
    return rows


def make_keys(num_rows: int, first_seed: int = 0) -> npt.NDArray[np.uint32]:
    seeds = np.arange(first_seed, first_seed + num_rows, dtype=np.uint64)
    return counter_words(seeds, np.zeros(num_rows, dtype=np.int64))


def on_device(logits: torch.Tensor, rows: Parameters, keys: npt.NDArray[np.uint32]) -> list[int]:
    """The kernels' tokens, as the engine gets them."""
    # Infinite logits, and rows of one group, make NaN in places that are not used.
    with np.errstate(invalid="ignore", over="ignore"):
        token_ids = engine.sampling.sampler._choose_by_kernel(logits.to(DEVICE), rows, keys)
    as_list: list[int] = token_ids.tolist()
    return as_list


def on_cpu(logits: torch.Tensor, rows: Parameters, keys: npt.NDArray[np.uint32]) -> list[int]:
    """The tokens of the definition."""
    as_list: list[int] = engine.sampling.sampler.choose(logits, rows, keys).tolist()
    return as_list


def assert_same_tokens(logits: torch.Tensor, rows: Parameters, first_seed: int = 0) -> None:
    keys = make_keys(len(rows), first_seed)
    assert on_device(logits, rows, keys) == on_cpu(logits, rows, keys)


def test_logits_are_read_in_the_dtype_that_the_output_head_gives(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 3 * PART, generator=generator) * 3).to(dtype)
    ways = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (0.9, 0, 0.6, 0.0)]
    ways += [(1.3, 0, 0.999, 0.0), (0.7, 40, 0.9, 0.1)]
    columns = ("temperature", "top_k", "top_p", "min_p")
    rows = parameters(6, **dict(zip(columns, zip(*ways, strict=True), strict=True)))
    keys = make_keys(6)
    found = sample_on_device(logits.to(DEVICE), upload_parameters(rows, keys, DEVICE))
    assert found.tolist() == on_cpu(logits.float(), rows, keys)


# ---------------------------------------------------------------- the tokens of the CPU sampler


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 2 * GROUP + 1),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    ways=st.lists(
        st.tuples(
            st.sampled_from(TEMPERATURES),
            st.sampled_from(TOP_KS),
            st.sampled_from(TOP_PS),
            st.sampled_from(MIN_PS),
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=12)
def test_any_parameters_in_one_batch(
    seed: int, vocab_size: int, spread: float, ways: list[tuple[float, int, float, float]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(ways), vocab_size, generator=generator) * spread
    temperature, top_k, top_p, min_p = zip(*ways, strict=True)
    rows = parameters(len(ways), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same_tokens(logits, rows, seed)


@pytest.mark.parametrize(
    ("spread", "filters"),
    [
        (1.0, {}),
        (1.0, {"temperature": 0}),
        (1.0, {"top_k": 50}),
        (1.0, {"top_k": 50, "top_p": 0.8}),
        (1.0, {"top_k": MOST // 2, "top_p": 0.9}),
        (1.0, {"top_p": 0.9}),  # flat: more than `choose` can hold
        (1.0, {"top_p": 0.3, "min_p": 1e-4}),
        (1.0, {"top_p": 1e-300}),  # no float32, but a request may ask for it
        (0.0, {"top_p": 1e-300}),  # all tokens alike: more than `choose` can hold
        (1.0, {"min_p": 0.01}),
        (1.0, {"min_p": 1e-5}),
        (1.0, {"top_k": 3000}),
        (1.0, {"top_k": 3000, "top_p": 0.7}),
        (4.0, {"top_p": 0.9}),
        (4.0, {"top_p": 0.999, "temperature": 1.5}),
        (8.0, {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.7}),
    ],
    ids=str,
)
def test_several_parts_of_a_larger_vocabulary(spread: float, filters: dict[str, float]) -> None:
    vocab_size, num_rows = 2 * PART + 77, 3
    generator = torch.Generator().manual_seed(int(spread * 1000) + len(filters))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    assert_same_tokens(logits, parameters(num_rows, **filters))


def test_the_best_groups_do_not_hold_all_that_is_kept() -> None:
    vocab_size = (DEFAULT_K + 40) * GROUP
    assert vocab_size > 2 * SEARCH_BLOCK
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    rows = parameters(6, top_k=[0, 0, 0] + 3 * [2 * MOST], min_p=[0, 0, 0.01, 0, 0, 0])
    rows["top_p"] = [0.7, 0.02, 1, 0.5, 1, 1]
    assert_same_tokens(logits, rows, 7)


def test_rows_that_are_apart_and_do_not_depend_on_each_other() -> None:
    wide = torch.randn(5, 700)
    logits, rows, keys = wide[:, :601], parameters(5, top_k=[0, 3, 9, 0, 4]), make_keys(5)
    rows["top_p"] = [1, 0.5, 1, 0.9, 1]
    together = on_device(logits, rows, keys)
    assert together == on_cpu(logits, rows, keys)
    for row in range(5):
        alone = slice(row, row + 1)
        assert on_device(logits[alone], rows[alone], keys[alone]) == together[alone]
    assert on_device(logits[:0], rows[:0], keys[:0]) == []


# ---------------------------------------------------------------- ties, infinities, no numbers


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
@pytest.mark.parametrize("num_equal", [5, PART + 5])
def test_equal_logits_stay_or_go_together(filters: dict[str, float], num_equal: int) -> None:
    logits = torch.full((3, PART + 100), -4.0)
    logits[:, 7 : 7 + num_equal] = 2.0
    assert_same_tokens(logits, parameters(3, **filters))


def test_top_k_counts_equal_logits_but_top_p_weighs_only_k_of_them() -> None:
    # Top-2 of four: weight e + 1, of which the first is 0.73. The ties are kept, or none is.
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(60, 1)
    for top_p, kept in ((0.72, {0}), (0.74, {0, 1, 2, 3})):
        rows, keys = parameters(60, top_k=2, top_p=top_p), make_keys(60)
        meant = on_cpu(logits, rows, keys)
        assert set(meant) == kept
        assert on_device(logits[:8], rows[:8], keys[:8]) == meant[:8]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]]).repeat(6, 1)
    assert_same_tokens(logits, parameters(6, top_k=1))
    assert_same_tokens(logits, parameters(6, temperature=0))


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str
)
def test_banned_tokens_are_not_drawn(filters: dict[str, float]) -> None:
    logits = torch.full((4, PART + 9), -torch.inf)
    logits[:, [3, PART + 2]] = torch.tensor([1.0, 0.5])
    assert_same_tokens(logits, parameters(4, **filters))
    assert on_device(torch.full((1, 70), -torch.inf), parameters(1, **filters), make_keys(1)) == [0]


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.2}], ids=str
)
@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_wrong", [1, PART + 1])
def test_a_row_without_numbers_gives_no_token_and_harms_no_other(
    filters: dict[str, float], num_wrong: int, value: float
) -> None:
    """Regression: the row gave token 0."""
    logits, keys = torch.randn(2, PART + 50), make_keys(2)
    logits[1, 20 : 20 + num_wrong] = value
    rows = parameters(2, **filters)
    found = on_device(logits, rows, keys)
    assert found == [*on_cpu(logits[:1], rows[:1], keys[:1]), NO_TOKEN]


def test_a_penalty_beyond_float32_is_not_taken_for_infinity() -> None:
    logits = torch.zeros(1, 40, dtype=torch.float64)
    logits[0, 7] = 1e300
    assert on_device(logits, parameters(1, temperature=0), make_keys(1)) == [7]


def test_extremes_of_temperature_and_logits() -> None:
    logits = torch.randn(4, 90)
    logits[2:] *= 1e30
    assert_same_tokens(logits, parameters(4, temperature=[1e-6, 1e30, 1e-6, 1], top_k=5))


# ---------------------------------------------------------------- the distribution


def chi_square(found: list[int], probabilities: npt.NDArray[np.float64]) -> float:
    counts = np.bincount(found, minlength=len(probabilities))
    assert (counts[probabilities == 0] == 0).all()
    expected = probabilities[probabilities > 0] * len(found)
    return float((((counts[probabilities > 0] - expected) ** 2) / expected).sum())


def nucleus(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    order = np.argsort(-weights)
    before = np.concatenate(([0.0], (weights[order] / weights.sum()).cumsum()[:-1]))
    return np.where(np.isin(np.arange(len(weights)), order[before < 0.8]), weights, 0)


@pytest.mark.parametrize(
    ("filters", "keep"),
    [
        ({"temperature": 0.8}, lambda weights: weights),
        ({"top_k": 5}, lambda weights: np.where(weights >= np.sort(weights)[-5], weights, 0)),
        ({"top_p": 0.8}, nucleus),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_draws_have_the_distribution_of_what_is_kept(
    filters: dict[str, float],
    keep: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> None:
    num_draws = 200 if filters.get("temperature") else 80
    logits = torch.linspace(-1.0, 1.0, 8)[torch.randperm(8)]
    weights = keep(np.exp(logits.double().numpy() / filters.get("temperature", 1.0)))
    found = on_device(
        logits.repeat(num_draws, 1), parameters(num_draws, **filters), make_keys(num_draws)
    )
    assert chi_square(found, weights / weights.sum()) < 30  # 7 degrees: one in 10,000


def test_the_noise_is_the_cpu_samplers_for_all_sizes_of_hashes() -> None:
    """Equal logits: the token is that of the largest hash's share, however far from the mean."""
    keys = make_keys(20)
    hashes = noise_hashes(keys[:, None], np.arange(PART))
    logits = torch.zeros(20, PART)
    # The noise falls as the hash rises: the least hash wins.
    assert on_device(logits, parameters(20), keys) == hashes.argmin(axis=1).tolist()
