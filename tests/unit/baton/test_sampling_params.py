"""Unit tests of SamplingParams: every limit, and a message that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import InvalidRequestError
from baton.sampling_params import MAX_SEED, MAX_TOKEN_ID, SamplingParams

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
    ("top_p", 0),
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
