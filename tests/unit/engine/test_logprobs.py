"""Unit tests of the most probable tokens beside each sampled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.logprobs import _best, _token_logprobs


@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.integers(0, 45), min_size=1, max_size=6))
def test_of_equal_ones_the_first_are_the_best(
    vocab_size: int, num_values: int, num_top: list[int]
) -> None:
    generator = torch.Generator().manual_seed(vocab_size * num_values)
    shape = (len(num_top), vocab_size)
    logprobs = torch.randint(0, num_values, shape, generator=generator).float()
    ids, values = _best(logprobs, num_top)
    for row, (known, num) in enumerate(zip(logprobs.tolist(), num_top, strict=True)):
        falling = sorted((-value, token_id) for token_id, value in enumerate(known))
        best = [token_id for _, token_id in falling]
        assert ids[row][:num] == best[:num]
        assert values[row][:num] == [known[token_id] for token_id in best[:num]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_others_ask_for_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 3000) * 2).to(dtype)
    tokens: list[Any] = [3, 1, 4, 1, 5]
    alone = [
        _token_logprobs(logits[row : row + 1], tokens[row : row + 1], [num])[0]
        for row, num in enumerate((0, 1, 2, 5, 20))
    ]
    assert _token_logprobs(logits, tokens, [0, 1, 2, 5, 20]) == alone
