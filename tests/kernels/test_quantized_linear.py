"""Linear layers of 4 and 8 bits in Triton against their definition.

In Triton's interpreter float8 rounds wrongly, so there it is given numbers that it has exactly.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels import (
    Float8Rows,
    GroupedIntegers,
    GroupedWeight,
    Groups,
    RoundedWeight,
    reference,
)
from baton_kernels.packed import FLOAT8
from baton_kernels.quantized import (
    four_bits,
    rounded_rows,
)
from baton_kernels.triton import quantized_linear as kernels
from baton_kernels.triton.fp8 import has_fp8
from tests.covering import covering
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.numerics.tolerances import assert_close

# Tokens, outputs, inputs: whole tiles and others, few tokens and many.
QUICK_SHAPES = ((1, 80, 192), (5, 64, 200), (33, 136, 512))
SLOW_SHAPES = ((70, 130, 256), (130, 80, 128))  # the interpreter takes seconds for each
SHAPES = [*QUICK_SHAPES, *(pytest.param(one, marks=pytest.mark.thorough) for one in SLOW_SHAPES)]


def integers_of(kind: str, num_rows: int, size: int) -> GroupedIntegers:
    """Rows as a checkpoint or ``--weights`` has them."""
    torch.manual_seed(1)

    def groups(of: int) -> int:
        return -(-size // of)

    match kind.split():
        case ["searched"]:
            return four_bits(torch.randn(num_rows, size))
        case ["factors", of]:  # K-quants: multiples of a factor that 256 inputs share

            def multiples(least: int) -> Tensor:
                return torch.randint(least, 64, (num_rows, groups(int(of)))).to(torch.int8)

            factors = [torch.rand(num_rows, groups(256)).half() / 256 for _ in range(2)]
            both = Groups(multiples(0), multiples(-64), *factors)
            numbers = torch.randint(0, 16, (num_rows, size))
            found = GroupedIntegers.of(4, numbers, both, int(of))
        case ["zeros", of]:  # AWQ and GPTQ
            zeros = torch.randint(-15, 1, (num_rows, groups(int(of)))).to(torch.int8)
            both = Groups(torch.rand(zeros.shape).half() / 8, zeros)
            found = GroupedIntegers.of(4, torch.randint(0, 16, (num_rows, size)), both, int(of))
        case ["minima", bits, of]:
            scales = torch.rand(num_rows, groups(int(of))) / 2 ** int(bits)
            both = Groups(scales, torch.randn(scales.shape))
            numbers = torch.randint(0, 2 ** int(bits), (num_rows, size))
            found = GroupedIntegers.of(int(bits), numbers, both, int(of))
        case [bits, of]:
            limit = 2 ** (int(bits) - 1)
            numbers = torch.randint(-limit, limit, (num_rows, size))
            scales = torch.rand(num_rows, groups(int(of))).bfloat16() / limit
            found = GroupedIntegers.of(int(bits), numbers, scales, int(of))
        case _:
            raise ValueError(kind)
    assert found is not None
    return found


KINDS = [
    *(
        "searched",
        "factors 16",
        "factors 32",
        "zeros 32",
        "zeros 128",
        "minima 4 64",
        "minima 8 32",
    ),
    *(f"{bits} {of}" for bits in (4, 8) for of in (16, 32, 64, 128, 100_000)),
]
# The interpreter computes no bfloat16, so these cases are for GPUs and cover no pair.
PRODUCTS = [
    *covering(QUICK_SHAPES, KINDS, (torch.float32, torch.float16)),
    *(
        pytest.param(shape, kind, dtype, marks=pytest.mark.thorough)
        for shape, kind, dtype in product(SLOW_SHAPES, KINDS, (torch.float32, torch.float16))
    ),
    *(
        pytest.param(shape, kind, torch.bfloat16, marks=pytest.mark.gpu)
        for shape, kind in product(QUICK_SHAPES + SLOW_SHAPES, KINDS)
    ),
]


def kept(integers: GroupedIntegers, device: torch.device) -> GroupedWeight:
    """Written in two pieces, as parts of a layer are."""
    num_rows = len(integers.numbers)
    weight = GroupedWeight.empty(num_rows, integers, device)
    for piece in (slice(0, num_rows // 3), slice(num_rows // 3, num_rows)):
        rows = integers.part(piece, None)
        assert rows is not None
        weight.write_rows(piece.start, rows)
    return weight


@pytest.mark.parametrize("kind", KINDS)
def test_integers_that_are_kept_stand_for_the_same_numbers(kind: str, device: torch.device) -> None:
    integers = integers_of(kind, 96, 200)
    assert torch.equal(kept(integers, device).dequantized().cpu(), integers.dequantized())


@pytest.mark.parametrize(("shape", "kind", "dtype"), PRODUCTS, indirect=["dtype"], ids=str)
def test_products_with_integers_in_groups(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, num_rows, size = shape
    weight = kept(integers_of(kind, num_rows, size), device)
    torch.manual_seed(0)
    x = (torch.randn(num_tokens, size) / size**0.5).to(device, dtype)
    numbers = weight.dequantized()
    if num_tokens >= kernels.GROUPED_UNPACKED_FROM or weight.groups.minima is not None:
        numbers = numbers.to(dtype).float()  # as the type of the inputs has them
    for bias in (None, torch.randn(num_rows).to(device, dtype)):
        found = kernels.quantized_linear(x, weight, bias)
        assert found.dtype == dtype
        assert_close(found, functional.linear(x.float(), numbers, wide(bias)).to(dtype))
    if num_tokens <= kernels.FEW_TOKENS:
        for parts in (2, 3):
            found = kernels.grouped_linear(x, weight, None, parts=parts)
            assert_close(found, functional.linear(x.float(), numbers).to(dtype))
    assert not weight.arrived.any()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_memory(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    weight = kept(integers_of(kind, 50, 200), device)
    assert torch.equal(kernels.unpacked(weight, dtype), weight.dequantized().to(dtype))


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_bytes(
    shape: tuple[int, ...], group_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    num_tokens, num_rows, size = shape
    torch.manual_seed(0)
    weight = RoundedWeight.empty(num_rows, size, torch.int8, group_size, device)
    weight.round_rows(0, torch.randn(num_rows, size))
    x = (torch.randn(num_tokens, size) / size**0.5).to(device, dtype)
    check_rounded(x, weight)


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_float8(
    shape: tuple[int, ...], group_size: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    if not has_fp8(device):
        pytest.skip("this GPU has no float8")
    num_tokens, num_rows, size = shape
    torch.manual_seed(0)
    weight = RoundedWeight.empty(num_rows, size, FLOAT8, group_size, device)
    x = torch.randn(num_tokens, size) / size**0.5
    if device.type == "cpu":  # few bits, and a largest number that leaves them as they are
        scales = torch.rand_like(weight.scales.T) / 8
        weight.write_rows(0, small_integers(num_rows, size).to(FLOAT8), scales)
        x = small_integers(num_tokens, size) * 32 / 512
        x[:, ::128] = 448 / 512
    else:
        weight.round_rows(0, torch.randn(num_rows, size))
    check_rounded(x.to(device, dtype), weight)


def small_integers(num_rows: int, size: int) -> Tensor:
    return torch.randint(-8, 9, (num_rows, size)).float()


def check_rounded(x: Tensor, weight: RoundedWeight) -> None:
    rounded, scales = kernels.round_inputs(x, weight.numbers.dtype, weight.group_size)
    scales = scales.T.repeat_interleave(weight.group_size, dim=1)[:, : weight.in_features]
    inputs = rounded.float() * scales
    # A GPU sums products of float8 with fewer bits than float32 has.
    few_bits = 4e-3 if x.is_cuda and weight.numbers.dtype == FLOAT8 else 0.0
    for bias in (None, torch.randn(weight.out_features).to(x)):
        found = kernels.quantized_linear(x, weight, bias)
        expected = functional.linear(inputs, weight.dequantized(), wide(bias)).to(x.dtype)
        check_close(found, expected, few_bits)
    expected = functional.linear(inputs, weight.dequantized()).to(x.dtype)
    check_close(kernels.rounded_linear(x, weight, None), expected, few_bits)
    if len(x) <= kernels.FEW_TOKENS:
        check_close(kernels.rounded_linear(x, weight, None, parts=2), expected, few_bits)
    assert not weight.arrived.any()


def wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def check_close(found: Tensor, expected: Tensor, few_bits: float) -> None:
    if few_bits and found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=few_bits, atol=few_bits)
    else:
        assert_close(found, expected)


@pytest.mark.parametrize("group_size", [512, 128])
def test_inputs_are_rounded_as_they_are_defined_to_be(
    group_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 500).to(device, dtype)
    x[3] = 0
    x[4, :200] = 0
    numbers, scales = kernels.round_inputs(x, torch.int8, group_size)
    expected_numbers, expected_scales = rounded_rows(x, torch.int8, group_size)
    assert torch.equal(scales.T, expected_scales)
    if device.type == "cuda":
        assert torch.equal(numbers, expected_numbers)
    else:  # the interpreter has no fused multiply-add: it rounds twice
        differ = (numbers.int() - expected_numbers.int()).abs()
        assert differ.max() <= 1
        assert differ.float().mean() < 1e-3


def test_bytes_give_a_token_the_same_bits_in_any_company(
    dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    weight = RoundedWeight.empty(136, 1024, torch.int8, None, device)
    weight.round_rows(0, torch.randn(136, 1024))
    x = torch.randn(130, 1024).to(device, dtype)
    whole = kernels.quantized_linear(x, weight)
    for rows in (slice(0, 1), slice(3, 8), slice(50, 114)):
        assert torch.equal(kernels.quantized_linear(x[rows], weight), whole[rows])


def test_many_tokens_are_rounded_too_where_the_vendor_multiplies(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float8 in groups: as by few tokens, but for the rounding to the type of the inputs."""
    if not has_fp8(device):
        pytest.skip("this GPU has no float8")
    torch.manual_seed(0)
    weight = RoundedWeight.empty(80, 256, FLOAT8, 128, device)
    scales = torch.rand_like(weight.scales.T) / 8
    weight.write_rows(0, small_integers(80, 256).to(FLOAT8), scales)
    x = small_integers(70, 256) * 32 / 512
    x[:, ::128] = 448 / 512
    x = x.to(device, dtype)
    expected = kernels.quantized_linear(x, weight)
    monkeypatch.setattr(kernels, "FLOAT8_UNPACKED_FROM", 60)
    found = kernels.quantized_linear(x, weight)
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=2e-2)


def test_rows_may_have_gaps_and_dimensions(device: torch.device) -> None:
    weight = kept(integers_of("4 32", 64, 128), device)
    torch.manual_seed(0)
    wide = torch.randn(3, 5, 256, device=device) / 16
    x: Any = wide[..., :128]
    assert_close(
        kernels.quantized_linear(x, weight), reference.quantized_linear(x.contiguous(), weight)
    )
    assert kernels.quantized_linear(x[:0], weight).shape == (0, 5, 64)
    turned = torch.randn(128, 6, device=device).T / 16
    expected = reference.quantized_linear(turned.contiguous(), weight)
    assert_close(kernels.quantized_linear(turned, weight), expected)


def test_some_rows_and_columns_of_float8() -> None:
    numbers, scales = small_integers(6, 512).to(FLOAT8), torch.rand(6, 4)
    rows = Float8Rows(numbers, scales, 128)
    some = rows.part(torch.tensor([4, 1]), slice(128, 384))
    assert some is not None
    assert torch.equal(some.dequantized(), rows.dequantized()[[4, 1], 128:384])
    assert rows.part(None, slice(64, 512)) is None
    of_all = Float8Rows(numbers, scales[:, :1], 512).part(slice(2, 4), slice(64, 512))
    assert of_all is not None
    assert torch.equal(of_all.dequantized(), numbers.float()[2:4, 64:] * scales[2:4, :1])


def test_searched_scales_are_better_than_the_largest_numbers() -> None:
    torch.manual_seed(0)
    rows = torch.randn(20, 500) * torch.rand(20, 1)
    rows[3] = 0
    rows[4, :128] = 0
    found = four_bits(rows)
    assert torch.equal(found.dequantized()[3], torch.zeros(500))
    filled = functional.pad(rows, (0, 12)).view(20, -1, 128)
    scales = filled.abs().amax(2, keepdim=True) / 7
    simple = (filled / scales.clamp(min=1e-30)).round() * scales
    error = (found.dequantized() - rows).square().sum()
    assert error < 0.9 * (simple - filled).square().sum()
    assert (found.dequantized() - rows).norm() < 0.12 * rows.norm()
