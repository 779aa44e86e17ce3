"""Unit tests of the prompt checks that every edge shares."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.prompt import check_prompt, check_sampling_params, draw_seed
from baton.api.sampling_params import SamplingParams


@pytest.mark.parametrize("token_ids", [[0], [9], [0] * 7, list(range(7))])
def test_a_prompt_inside_all_limits_is_accepted(token_ids: list[int]) -> None:
    check_prompt(token_ids, vocab_size=10, max_model_len=8)


@pytest.mark.parametrize(
    ("token_ids", "problem"),
    [
        ([], "must have at least 1 token, got 0"),
        ([1] * 8, "is too long: 8 tokens > 7 maximum"),
        ([1] * 9, "is too long: 9 tokens > 7 maximum"),
        ([1, 10, 11], "token ids must be 0 to 9 (the vocabulary), got 10"),
        ([1, -1], "token ids must be 0 to 9 (the vocabulary), got -1"),
    ],
)
def test_a_prompt_outside_a_limit_is_refused_and_the_limit_is_named(
    token_ids: list[int], problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(token_ids, vocab_size=10, max_model_len=8, field="prompt_token_ids")
    assert (caught.value.field, caught.value.problem) == ("prompt_token_ids", problem)


def test_drawn_seeds_are_valid_seeds_and_differ() -> None:
    seeds = {draw_seed() for _ in range(50)}
    assert len(seeds) == 50
    for seed in seeds:
        SamplingParams(seed=seed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (10,)),
        ("allowed_token_ids", (3, 10)),
        ("banned_token_ids", (10,)),
        ("logit_bias", ((3, 1.0), (10, 1.0))),
    ],
)
def test_a_parameter_that_names_a_token_outside_the_vocabulary_is_refused(
    field: str, value: Any
) -> None:
    params = SamplingParams(**{field: value})
    check_sampling_params(params, vocab_size=11)
    with pytest.raises(InvalidRequestError, match=f"^{field}: .* 0 to 9 .* got 10$"):
        check_sampling_params(params, vocab_size=10)


def test_banning_the_whole_vocabulary_is_refused() -> None:
    params = SamplingParams(banned_token_ids=(0, 1, 2, 2))
    check_sampling_params(params, vocab_size=4)
    with pytest.raises(InvalidRequestError, match=r"^banned_token_ids: must leave .* got all 3$"):
        check_sampling_params(params, vocab_size=3)
