"""Triton convolutions, recurrences and gated norms against their definitions, for any chunks."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import reference
from baton_kernels.triton.recurrent import causal_conv, gated_norm, recurrence
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.kernels.poison import strided
from tests.numerics.state_steps import Case, Cuts, random_cuts
from tests.numerics.tolerances import assert_close


class TritonOps:
    """The ops under the names that a module of ops has for them."""

    causal_conv = staticmethod(causal_conv.causal_conv)
    gated_delta_rule = staticmethod(recurrence.gated_delta_rule)
    selective_scan = staticmethod(recurrence.selective_scan)


def check(case: Case, lengths: tuple[int, ...], cuts: list[Cuts], padding: int) -> None:
    texts = [case.rows(length) for length in lengths]
    outs, states = case.compute(TritonOps, texts, cuts, padding)
    expected_outs, expected_states = case.compute(reference, texts, cuts, padding)
    for found, expected in zip((*outs, *states), (*expected_outs, *expected_states), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["conv", "gated conv", "scan", "delta"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_texts_in_any_cut(name: str, large: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    case = Case(name, dtype, large=large, device=device)
    lengths = (1, 2, 6) if large else (1, 2, 3, 40)
    check(case, lengths, [random_cuts(length, 1) for length in lengths], padding=2)


@pytest.mark.parametrize("name", ["conv", "gated conv", "scan", "delta"])
def test_decode_steps(name: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    case = Case(name, dtype, large=False, device=device)
    one_by_one: Cuts = [[at, at + 1] for at in range(5)]
    check(case, (5, 5), [one_by_one] * 2, padding=0)


@pytest.mark.parametrize("name", ["conv", "gated conv"])
def test_programs_share_the_tokens_of_a_prompt(name: str, device: torch.device) -> None:
    case = Case(name, torch.float32, large=False, device=device)
    check(case, (90, 7), [[[0, 33, 64], [64, 90]], [[0, 7]]], padding=1)


@pytest.mark.parametrize(
    ("num_tokens", "size", "group_size", "norm_before_gate"),
    [
        (1, 5, 5, True),
        (4, 48, 12, True),
        (3, 48, 12, False),
        (2, 2500, 2500, False),
        (0, 8, 4, True),
    ],
)
def test_gated_norm(
    num_tokens: int,
    size: int,
    group_size: int,
    norm_before_gate: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x, gate = (strided(torch.randn(num_tokens, size).to(device, dtype)) for _ in range(2))
    for weight_size in (size, group_size):
        weight = torch.randn(weight_size).to(device, dtype)
        found, expected = (
            op(x, gate, weight, 1e-5, group_size=group_size, norm_before_gate=norm_before_gate)
            for op in (gated_norm.gated_rms_norm, reference.gated_rms_norm)
        )
        assert_close(found, expected)
