"""Unit tests of SamplingParams: every limit, and a message that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.sampling_params import MAX_SEED, MAX_TOKEN_ID, SamplingParams

INT32_MAX = 2**31 - 1

ACCEPTED: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("max_tokens", INT32_MAX),
    ("temperature", 0),
    ("temperature", 1e-300),
    ("temperature", 1e300),
    ("top_k", 0),
    ("top_k", INT32_MAX),
    ("top_p", 1),
    ("top_p", 5e-324),
    ("seed", None),
    ("seed", 0),
    ("seed", MAX_SEED),
    ("seed", -MAX_SEED - 1),
    ("stop_token_ids", ()),
    ("stop_token_ids", (0, MAX_TOKEN_ID)),
    ("ignore_eos", True),
    ("min_p", 0),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", 1e308),
    ("logit_bias", ((0, -100.0), (MAX_TOKEN_ID, 100.0))),
    ("logit_bias", tuple((token_id, 1.0) for token_id in range(300))),
    ("allowed_token_ids", None),
    ("allowed_token_ids", (0, MAX_TOKEN_ID)),
    ("banned_token_ids", (3,)),
    ("logprobs", None),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", None),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("min_tokens", 0),
    ("min_tokens", 128),  # the default of max_tokens
    ("stop", ("a",) * 16),
    ("stop", ("\n\n", "\N{HIGH VOLTAGE SIGN}" * 1000)),
]
REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", INT32_MAX + 1),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_tokens", "7"),
    ("max_tokens", None),
    ("temperature", -1e-9),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", INT32_MAX + 1),
    ("top_k", 2.5),
    ("top_p", -0.1),
    ("top_p", 1.0000001),
    ("top_p", math.nan),
    ("top_p", True),
    ("seed", MAX_SEED + 1),
    ("seed", -MAX_SEED - 2),
    ("seed", 1.5),
    ("seed", False),
    ("stop_token_ids", (3, -1)),
    ("stop_token_ids", (MAX_TOKEN_ID + 1,)),
    ("stop_token_ids", ("3",)),
    ("stop_token_ids", (True,)),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", 2.1),
    ("presence_penalty", None),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", math.inf),
    ("logit_bias", ((3, 100.5),)),
    ("logit_bias", ((-1, 0.0),)),
    ("logit_bias", ((3, math.nan),)),
    ("logit_bias", 3),
    ("allowed_token_ids", 7),
    ("allowed_token_ids", (3, -1)),
    ("banned_token_ids", (2.5,)),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("logprobs", True),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("min_tokens", True),
    ("stop", ("a", "")),
    ("stop", ("a", 3)),
    ("stop", 3),
    ("stop", ("\ud800",)),
]


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_a_value_on_its_limit_is_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_outside_its_limit_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: must be ")
    shown = value[-1] if isinstance(value, tuple) else value
    if field == "logit_bias" and isinstance(shown, tuple):
        shown = shown[0] if shown[0] < 0 else shown[1]
    if shown not in ("", "\ud800"):  # what cannot be shown is told by its length, or escaped
        assert str(shown) in caught.value.problem  # the user sees what was wrong
    assert "\n" not in str(caught.value)


def test_the_error_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_stop_token_ids_become_a_tuple_so_that_the_value_is_hashable_and_frozen() -> None:
    given = [3, 4]
    params = SamplingParams(stop_token_ids=given)  # type: ignore[arg-type]  # users pass lists
    given.append(5)
    assert params.stop_token_ids == (3, 4)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3, 4)))


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop", ("a",) * 17, "at most 16, got 17"),
        ("stop", ("a" * 1001,), "1 to 1000 characters, got 1001"),
        ("logit_bias", dict.fromkeys(range(301), 1.0), "at most 300, got 301"),
        ("logit_bias", [(3, 1.0), (3, 2.0)], "name a token once, got 3 twice"),
        ("logit_bias", [3], "pairs of token id and bias, got 3"),
        ("stop_token_ids", "35", "a list of token ids, got '35'"),
        ("banned_token_ids", (1,) * 4097, "at most 4096, got 4097"),
        ("allowed_token_ids", (), r"at least 1 that is not banned, got \(\)"),
    ],
)
def test_a_list_outside_its_limit_is_refused_by_the_fields_name(
    field: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: must .*{limit}$"):
        SamplingParams(**{field: value})


def test_a_token_that_is_allowed_and_banned_is_banned_and_another_must_be_left() -> None:
    SamplingParams(allowed_token_ids=(1, 2), banned_token_ids=(1,))
    with pytest.raises(
        InvalidRequestError, match=r"^allowed_token_ids: .* not banned, got \(1,\)$"
    ):
        SamplingParams(allowed_token_ids=(1,), banned_token_ids=(1, 3))


def test_biases_are_kept_sorted_so_that_their_order_does_not_matter() -> None:
    given: Any = {7: 1, 3: -2.5}
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params == SamplingParams(logit_bias=((7, 1.0), (3, -2.5)))
    assert hash(params) == hash(SamplingParams(logit_bias=params.logit_bias))


def test_one_stop_string_is_not_taken_for_its_characters() -> None:
    text: Any = "END"
    assert SamplingParams(stop=text).stop == ("END",)


@pytest.mark.parametrize(("field", "value"), [("top_k", 3), ("min_p", 0.5), ("stop", ("a",))])
def test_what_only_filters_or_ends_leaves_the_logits_alone(field: str, value: Any) -> None:
    assert not SamplingParams(**{field: value}).changes_logits
