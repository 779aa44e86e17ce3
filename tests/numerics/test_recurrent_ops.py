"""Ops with states: their definition against transformers, C against it, and any cut of a text.

Refuses to know: layers and engines.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from baton_kernels import dispatch, reference
from tests.numerics.state_steps import Case, Cuts, random_cuts, steps_of
from tests.numerics.tolerances import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NATIVE = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")
LENGTHS = (1, 2, 3, 40, 17)
NAN = float("nan")

pytestmark = pytest.mark.usefixtures("threads")


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected)


CASES = pytest.mark.parametrize("name", ["conv", "gated conv", "scan", "delta"])
SIZES = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])


@CASES
@SIZES
@DTYPES
@NATIVE
def test_c_is_what_the_reference_is(name: str, large: bool, dtype: torch.dtype) -> None:
    native = dispatch.native_ops()
    case = Case(name, dtype, large=large)
    texts = [case.rows(length) for length in LENGTHS]
    cuts = [random_cuts(length, seed) for seed, length in enumerate(LENGTHS)]
    ours, theirs = (case.compute(ops, texts, cuts, padding=2) for ops in (native, reference))
    for found, expected in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert_close(found, expected)


@CASES
@DTYPES
@pytest.mark.parametrize("ops", [pytest.param("native", marks=NATIVE), "reference"])
def test_results_do_not_depend_on_cuts_and_company(name: str, dtype: torch.dtype, ops: str) -> None:
    """In C to the bit; torch computes the last elements of a row otherwise than those before."""
    module: Any = reference if ops == "reference" else dispatch.native_ops()
    same = assert_close if ops == "reference" else assert_equal
    case = Case(name, dtype, large=ops == "native")
    texts = [case.rows(length) for length in LENGTHS]
    whole = [case.compute(module, [text], [[[0, len(text[0])]]]) for text in texts]
    one_by_one: list[Cuts] = [[[at, at + 1] for at in range(length)] for length in LENGTHS]
    for cuts in (
        [[[0, length]] for length in LENGTHS],
        one_by_one,
        *([random_cuts(length, seed) for length in LENGTHS] for seed in range(3)),
    ):
        outs, states = case.compute(module, texts, cuts)
        for (alone, (behind,)), out, state in zip(
            [(out, state) for (out,), state in whole], outs, states, strict=True
        ):
            same(out, alone)
            same(state, behind)


@pytest.mark.parametrize("ops", [pytest.param("native", marks=NATIVE), "reference"])
def test_a_segment_without_a_slot_writes_nothing(ops: str) -> None:
    module = reference if ops == "reference" else dispatch.native_ops()
    for name in ("conv", "scan", "delta"):
        case = Case(name, torch.float32, large=False)
        (metadata, _), *_ = steps_of([[[0, 2, 5]]])[0]
        metadata.write_slots[:] = -1
        states = torch.full((3, *case.state_shape), NAN)
        rows = case.rows(5)
        out = case.run(module, rows, states, metadata)
        assert states.isnan().all()
        whole = case.compute(module, [rows], [[[0, 5]]])[0][0]
        assert_close(out, whole)


def test_the_scan_is_that_of_transformers() -> None:
    heads, groups, head_dim, state_dim, length = 6, 2, 20, 24, 50
    x, dt = torch.randn(length, heads, head_dim), torch.randn(length, heads)
    b, c = torch.randn(2, length, groups, state_dim)
    a_log, dt_bias, d = torch.randn(3, heads)
    expected, state = bamba.mamba2_chunk_scan(
        *(x[None], dt[None], -a_log.exp(), b[None], c[None], 16),
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        return_final_states=True,
    )
    (metadata, _), *_ = steps_of([[[0, length]]])[0]
    states = torch.zeros(2, heads, state_dim, head_dim)
    found = reference.selective_scan(x, dt, b, c, a_log, dt_bias, d, states, metadata)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1], state[0].mT, rtol=1e-4, atol=1e-4)


def test_the_delta_rule_is_that_of_transformers() -> None:
    heads, key_heads, key_dim, value_dim, length = 6, 2, 20, 24, 50
    query, key = torch.randn(2, length, key_heads, key_dim)
    value, (a, b) = torch.randn(length, heads, value_dim), torch.randn(2, length, heads)
    a_log, dt_bias = torch.randn(2, heads)
    decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    expected, state = qwen3_next.torch_recurrent_gated_delta_rule(
        *(query[None], key[None], value[None], decay[None], b.sigmoid()[None]),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    (metadata, _), *_ = steps_of([[[0, length]]])[0]
    states = torch.zeros(2, heads, key_dim, value_dim)
    found = reference.gated_delta_rule(query, key, value, a, b, a_log, dt_bias, states, metadata)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1], state[0], rtol=1e-4, atol=1e-5)


def test_the_convolution_is_that_of_torch() -> None:
    x, weight, bias = torch.randn(9, 5), torch.randn(5, 4), torch.randn(5)
    expected = torch.nn.functional.conv1d(
        x.T, weight.unsqueeze(1), bias, padding=3, groups=5
    )[:, :9].T  # fmt: skip
    (metadata, _), *_ = steps_of([[[0, 9]]])[0]
    found = reference.causal_conv(
        x, weight, bias, torch.zeros(2, 5, 3), metadata, has_silu=False
    )  # fmt: skip
    assert_close(found, expected)


GROUPS = [(1, 5, 5, True), (4, 48, 12, True), (3, 48, 12, False), (2, 300, 300, False)]


@DTYPES
@pytest.mark.parametrize(("num_tokens", "size", "group_size", "norm_before_gate"), GROUPS)
@NATIVE
def test_gated_norm(
    num_tokens: int, size: int, group_size: int, norm_before_gate: bool, dtype: torch.dtype
) -> None:
    native = dispatch.native_ops()
    assert native is not None
    x, gate = (torch.randn(num_tokens, size + 3).to(dtype)[:, :size] for _ in range(2))
    for weight in (torch.randn(size).to(dtype), torch.randn(group_size).to(dtype)):
        found, expected = (
            ops.gated_rms_norm(
                x, gate, weight, 1e-5, group_size=group_size, norm_before_gate=norm_before_gate
            )
            for ops in (native, reference)
        )
        assert_close(found, expected)


def test_gated_norms_are_those_of_transformers() -> None:
    x, gate = torch.randn(2, 7, 24)
    after = bamba.BambaRMSNormGated(24, group_size=8, eps=1e-5)
    before = qwen3_next.Qwen3NextRMSNormGated(8, eps=1e-5)
    with torch.no_grad():
        for norm in (after, before):
            norm.weight.normal_()
        found = reference.gated_rms_norm(
            x, gate, after.weight, 1e-5, group_size=8, norm_before_gate=False
        )
        assert_close(found, after(x, gate))
        found = reference.gated_rms_norm(
            x, gate, before.weight, 1e-5, group_size=8, norm_before_gate=True
        )
        expected = before(x.view(-1, 8), gate.view(-1, 8)).view(7, 24)
        assert_close(found, expected)
