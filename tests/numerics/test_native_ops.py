"""The ops in C against their definition, in every storage type, over poisoned memory.

Refuses to know: which model would call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import baton_kernels as ops
from baton_kernels import GroupedIntegers, Groups, WeightFormat, dispatch, reference
from baton_kernels.attention.base import AttentionOptions
from baton_kernels.attention.native import NativeAttention
from baton_kernels.native.ops import NativeOps
from tests.covering import covering
from tests.numerics.packed import numbers_of
from tests.numerics.paged import make_cache, make_metadata, make_tables

# dtype: (relative, absolute). Both compute in float32; sums run in another order, and a value that
# is rounded to bfloat16 twice may end a unit away.
TOLERANCES = {
    torch.float32: (1e-5, 2e-5),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float16: (2e-3, 2e-3),
}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def two_threads(threads_as_before: None) -> None:
    """Small inputs stay on one thread by themselves; the others must be cut right."""
    torch.manual_seed(0)
    torch.set_num_threads(2)


@pytest.fixture
def native() -> NativeOps:
    found = dispatch.native_ops()
    assert found is not None
    return found


def close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@TYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 2, 64), (40, 768), (0, 16)])
def test_rms_norm(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@TYPES
@pytest.mark.parametrize("shape", [(1, 5), (33, 768)])
def test_add_rms_norm(native: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight, before = torch.randn(shape[1]).to(dtype), residual.clone()
    normed, total = native.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    close(normed, expected)
    assert torch.equal(total, expected_total)
    assert torch.equal(residual, before)


@TYPES
@pytest.mark.parametrize("shape", [(1, 2), (7, 6, 34), (19, 4096)])
def test_silu_mul(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape) * 30).to(dtype)  # both ends of the exponential
    close(native.silu_mul(gate_up), reference.silu_mul(gate_up))


@TYPES
@pytest.mark.parametrize("factor", [1.0, 0.22])
@pytest.mark.parametrize("shape", [(1, 5), (33, 768)])
def test_add_rms_norm_with_a_wide_weight_and_a_factor(
    native: NativeOps, shape: tuple[int, int], factor: float, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = 1 + torch.randn(shape[1]) / 100  # whose last digits 16 bits would lose
    both = [one.add_rms_norm(x, residual, weight, 1e-5, factor) for one in (native, reference)]
    for found, expected in zip(*both, strict=True):
        assert found.dtype == dtype
        close(found, expected)
    close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    total = native.scaled_add(x, residual, factor, 1.5 * factor)
    close(total, reference.scaled_add(x, residual, factor, 1.5 * factor))


@TYPES
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 2), (7, 6, 34), (19, 4096)])
def test_gated_mul(
    native: NativeOps, shape: tuple[int, ...], activation: str, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(shape) * 8).to(dtype)
    close(native.gated_mul(gate_up, activation), reference.gated_mul(gate_up, activation))


@TYPES
@pytest.mark.parametrize("activation", ["sigmoid", "relu", "silu"])
@pytest.mark.parametrize("shape", [(1, 2), (7, 34), (19, 1003)])
def test_gate_mul(
    native: NativeOps, shape: tuple[int, int], activation: str, dtype: torch.dtype
) -> None:
    num_rows, size = shape
    gate, x = ((torch.randn(num_rows, size + 3) * 8).to(dtype)[:, :size] for _ in range(2))
    close(native.gate_mul(gate, x, activation), reference.gate_mul(gate, x, activation))
    found = native.gate_mul(x, x, activation)  # of one tensor
    close(found, reference.gate_mul(x, x, activation))
    alone = [native.gate_mul(gate[i : i + 1], x[i : i + 1], activation) for i in range(num_rows)]
    assert torch.equal(torch.cat(alone), native.gate_mul(gate, x, activation))


@TYPES
@pytest.mark.parametrize("shape", [(1, 3), (3, 1003)])
def test_soft_cap(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    found, expected = native.soft_cap(x, 30.0), reference.soft_cap(x, 30.0)
    close(found, expected)
    assert float(found.abs().max()) <= 30.0


@TYPES
@pytest.mark.parametrize("rotary_dim", [24, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_norm_rotary_store_with_norms_over_all_heads(
    native: NativeOps, rotary_dim: int, wide: bool, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = 6, 2, 24
    table = make_tables([5], 4, num_blocks=9)
    slots = make_metadata([5], [5], table, 4, 2).slot_mapping
    ours, theirs = (make_cache(9, 3, num_kv_heads, 4, head_dim).to(dtype)[:, 1] for _ in range(2))
    qkv = torch.randn(7, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    cos, sin = torch.randn(2, 7, rotary_dim).to(dtype)
    weights = torch.randn(num_heads + num_kv_heads, head_dim)
    weights = weights if wide else weights.to(dtype)
    found, expected = (
        op(
            *(qkv, num_heads, cos, sin, cache, slots),
            query_weight=weights[:num_heads].flatten(),
            key_weight=weights[num_heads:].flatten(),
            eps=1e-6,
        )
        for op, cache in ((native.norm_rotary_store, ours), (reference.norm_rotary_store, theirs))
    )
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2e-2, 6e-2)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


@TYPES
@pytest.mark.parametrize("rotary_dim", [24, 8])
@pytest.mark.parametrize("norms", ["qk", "q", "", "qkv", "v", "q only"])
@pytest.mark.parametrize("num_tokens", [5, 300])
def test_norm_rotary_store(
    native: NativeOps, num_tokens: int, norms: str, rotary_dim: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = 6, 2, 24, 4
    table = make_tables([num_tokens], block_size, num_blocks=90)
    metadata = make_metadata([num_tokens], [num_tokens], table, block_size, 2)
    slots = None if norms == "q only" else metadata.slot_mapping
    ours, theirs = (
        make_cache(90, 3, num_kv_heads, block_size, head_dim).to(dtype)[:, 1] for _ in range(2)
    )
    num_kinds = 0 if slots is None else 2
    qkv = torch.randn(num_tokens + 2, (num_heads + num_kinds * num_kv_heads) * head_dim).to(dtype)
    cos, sin = torch.randn(2, num_tokens + 2, rotary_dim).to(dtype)
    weights = torch.randn(3, head_dim).to(dtype)
    found, expected = (
        op(
            *(qkv, num_heads, cos, sin, cache, slots),
            query_weight=weights[0] if "q" in norms else None,
            key_weight=weights[1] if "k" in norms else None,
            value_weight=weights[2] if "v" in norms else None,
            eps=1e-6,
        )
        for op, cache in ((native.norm_rotary_store, ours), (reference.norm_rotary_store, theirs))
    )
    # In bfloat16 the definition rounds between norm, products and sum, each time by 2^-9.
    rtol, atol = (1e-5, 2e-5) if dtype == torch.float32 else (2e-2, 6e-2)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


@TYPES
@pytest.mark.parametrize("storage", ops.FORMATS_OF_ROWS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"),
    # One row, a block, a block and a bit, several blocks, several chunks; slices of the depth.
    [(0, 5, 3), (1, 1, 1), (1, 33, 300), (12, 64, 33), (13, 31, 64), (32, 100, 520), (700, 70, 9)],
)
def test_packed_linear(
    native: NativeOps,
    num_rows: int,
    out_features: int,
    in_features: int,
    storage: WeightFormat,
    dtype: torch.dtype,
) -> None:
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    packed = ops.PackedWeight.pack(weight, bias, storage, native.panel_width)
    wide = torch.full((num_rows, in_features + 3), torch.nan)
    wide[:, :in_features] = torch.randn(num_rows, in_features) / in_features**0.5
    x = wide.to(dtype)[:, :in_features]  # rows that do not touch
    close(native.packed_linear(x, packed), reference.packed_linear(x, packed))


@TYPES
@pytest.mark.parametrize(
    ("storage", "num_rows", "half"),  # of the outputs; whole panels or not
    covering(ops.FORMATS_OF_ROWS, [0, 1, 9, 40, 500], [37, 96]),
    ids=str,
)
def test_packed_gated_linear(
    native: NativeOps, half: int, num_rows: int, storage: WeightFormat, dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(2 * half, 203), torch.randn(2 * half)
    packed = ops.PackedWeight.pack(weight, bias, storage, native.panel_width)
    x = (torch.randn(num_rows, 203) / 203**0.5).to(dtype)
    close(native.packed_gated_linear(x, packed), reference.packed_gated_linear(x, packed))


def draw_integers(bits: int, shape: tuple[int, int], layout: ops.CodeLayout) -> GroupedIntegers:
    """Draw rows in a layout; its numbers of groups are of sizes as weights have them."""
    num_rows, in_features = shape
    groups, supers = (-(-in_features // size) for size in (layout.group_size, 256))

    def draw(size: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        if dtype is None:
            return None
        if dtype == torch.int8:
            return torch.randint(-127, 128, (num_rows, size), dtype=torch.int8)
        return (torch.randn(num_rows, size) / 100).to(dtype)

    scales, minima = draw(groups, layout.scales), draw(groups, layout.minima)
    factors = draw(supers, layout.factors)
    assert scales is not None
    of_minima = None if factors is None or minima is None else factors.flip(0)
    if layout.is_e2m1:
        codes = torch.randint(16, shape)
        numbers = torch.tensor(ops.E2M1_TWICE, dtype=torch.int8)[codes]
        return GroupedIntegers(bits, numbers, Groups(scales), layout.group_size, is_e2m1=True)
    least = -(2 ** (bits - 1)) if minima is None else 0
    numbers = torch.randint(least, least + 2**bits, shape)
    found = GroupedIntegers.of(
        bits, numbers, Groups(scales, minima, factors, of_minima), layout.group_size
    )
    assert found is not None
    assert found.layout == layout
    return found


F32, BF16, F16, I8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
CODES = (WeightFormat.INT8, WeightFormat.INT6, WeightFormat.INT4)


@pytest.mark.parametrize(
    ("group_size", "types"),
    [
        (32, (F32,)), (64, (BF16,)), (128, (F16,)), (192, (F32,)),
        (32, (F16, F16)), (128, (BF16, F32)), (192, (F32, BF16)),
        (128, (F16, I8)), (64, (F32, I8)), (32, (I8, I8, F16)), (16, (I8, I8, BF16)),
        (16, (I8, None, F16)), (16, (F32,)), (256, (I8, None, F32)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_", CODES, ids=str)
def test_codes_in_groups(
    native: NativeOps,
    format_: WeightFormat,
    group_size: int,
    types: Sequence[torch.dtype],
) -> None:
    """Pack and multiply codes, symmetric or not, and compare with the reference."""
    check_codes(native, ops.CodeLayout(format_, group_size, *types))


@pytest.mark.parametrize("scales", [BF16, torch.float32], ids=str)  # of MXFP4 and NVFP4
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_codes_of_e2m1(native: NativeOps, group_size: int, scales: torch.dtype) -> None:
    layout = ops.CodeLayout(WeightFormat.INT4, group_size, scales, is_e2m1=True)
    check_codes(native, layout)


@pytest.mark.parametrize(
    ("group_size", "types"), [(16, (I8, None, F16)), (32, (I8, I8, F16)), (128, (F16,))]
)
def test_codes_of_six_bits_give_the_bits_of_eight(
    native: NativeOps, group_size: int, types: Sequence[torch.dtype]
) -> None:
    """Few rows and many, which are multiplied in other ways."""
    for shape in ((75, 300), (64, 1104)):
        layout = ops.CodeLayout(WeightFormat.INT6, group_size, *types)
        six = draw_integers(6, shape, layout)
        packed = []
        for integers in (six, replace(six, bits=8)):
            sizes = (*shape, integers.layout.format, native.panel_width)
            packed.append(ops.PackedWeight.empty(*sizes, layout=integers.layout))
            native.pack_integers(packed[-1], 0, integers)
        assert packed[0].panels.numel() < 0.8 * packed[1].panels.numel()
        for has_fine_inputs in (False, True):
            both = [replace(one, has_fine_inputs=has_fine_inputs) for one in packed]
            for num_rows in (*range(1, 15), 65):
                x = torch.randn(num_rows, shape[1])
                ours, theirs = (native.packed_linear(x, one) for one in both)
                assert torch.equal(ours, theirs), num_rows


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_codes_of_six_bits(native: NativeOps, sign: int) -> None:
    """No 16-bit sum ends at its limit."""
    groups = Groups(torch.ones(40, 8), torch.zeros(40, 8))
    integers = GroupedIntegers.of(6, torch.full((40, 256), 63), groups, 32)
    assert integers is not None
    shape = (40, 256, WeightFormat.INT6, native.panel_width)
    weight = ops.PackedWeight.empty(*shape, layout=integers.layout)
    native.pack_integers(weight, 0, integers)
    found = native.packed_linear(torch.full((2, 256), float(sign)), weight)
    torch.testing.assert_close(found, torch.full((2, 40), sign * 63.0 * 256))


@pytest.mark.parametrize("number", [12, -12])
def test_sums_of_the_largest_numbers_of_e2m1(native: NativeOps, number: int) -> None:
    """No sum of a group ends, whichever sign inputs have."""
    numbers = torch.full((40, 256), number, dtype=torch.int8)
    integers = GroupedIntegers(4, numbers, Groups(torch.ones(40, 8)), 32, is_e2m1=True)
    shape = (40, 256, WeightFormat.INT4, native.panel_width)
    weight = ops.PackedWeight.empty(*shape, layout=integers.layout)
    native.pack_integers(weight, 0, integers)
    x = torch.tensor([[1.0], [-1.0]]).expand(2, 256).contiguous()
    expected = torch.tensor([[1.0], [-1.0]]).expand(2, 40) * number * 256
    torch.testing.assert_close(native.packed_linear(x, weight), expected)


def check_codes(native: NativeOps, layout: ops.CodeLayout) -> None:
    """Packed, read and multiplied as the reference does; a row alone as among others."""
    bits = layout.format.code_bits
    assert bits is not None
    out_features, in_features = 75, 300
    integers = draw_integers(bits, (out_features, in_features), layout)
    shape = (out_features, in_features, layout.format, native.panel_width)
    weight, expected = (ops.PackedWeight.empty(*shape, layout=layout) for _ in range(2))
    expected.write_integers(0, integers)
    native.pack_integers(weight, 0, integers)
    for ours, theirs in zip(numbers_of(weight), numbers_of(expected), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]
    assert torch.equal(weight.unpacked(), integers.dequantized())
    ids = torch.tensor([[74, 0, 31], [32, 5, 5]])
    for dtype in (None, F32, BF16, F16):
        found = native.unpack_rows(weight, ids, dtype)
        assert torch.equal(found, reference.unpack_rows(weight, ids, dtype))
        assert found.dtype == (dtype or F32)
    x = torch.randn(57, in_features) / in_features
    for has_fine_inputs in (False, True):
        weight = replace(weight, has_fine_inputs=has_fine_inputs)
        together = native.packed_linear(x, weight)
        close(together, reference.packed_linear(x, weight))
        for part in (slice(5, 6), slice(40, 53)):
            assert torch.equal(native.packed_linear(x[part], weight), together[part])
    exact = functional.linear(x, weight.unpacked())
    assert float((together - exact).abs().max()) < 1e-4 * float(exact.abs().max())


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("format_", CODES, ids=str)
def test_large_inputs_of_another_group_round_nothing_away(
    native: NativeOps, format_: WeightFormat, group_size: int
) -> None:
    """Inputs that meet one group share a scale, whatever the inputs of other groups are."""
    layout = ops.CodeLayout(format_, group_size, F32)
    assert format_.code_bits is not None
    integers = draw_integers(format_.code_bits, (40, 128), layout)
    is_large = torch.arange(128) // group_size % 2 == 1  # every other group
    integers.numbers[:, is_large] = 0  # weights of the large inputs
    weight = ops.PackedWeight.empty(40, 128, format_, native.panel_width, layout=layout)
    native.pack_integers(weight, 0, integers)
    x = torch.randn(3, 128) * torch.where(is_large, 10_000, 1)
    expected = functional.linear(x, integers.dequantized())
    found = native.packed_linear(x, weight)
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_an_input_that_is_no_number_stays_none(native: NativeOps) -> None:
    weight = ops.PackedWeight.pack(torch.ones(40, 300), None, WeightFormat.INT8, native.panel_width)
    x = torch.ones(4, 300)
    x[0, 7], x[1, 299], x[2] = torch.nan, torch.inf, 0
    found = native.packed_linear(x, weight)
    assert not found[:2].isfinite().any()
    assert torch.equal(found[2], torch.zeros(40))
    torch.testing.assert_close(
        found[3], torch.full((40,), 300.0), rtol=5e-3, atol=0
    )  # a scale in bfloat16


def test_gates_at_the_limits_of_the_exponential(native: NativeOps) -> None:
    gate_up = torch.tensor([[-1e30, -100.0, -88.0, -0.0, 88.0, 1e30, torch.nan, torch.inf] * 4])
    found, expected = native.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("storage", ops.FORMATS_OF_ROWS, ids=str)
def test_a_row_does_not_depend_on_its_batch(native: NativeOps, storage: WeightFormat) -> None:
    packed = ops.PackedWeight.pack(torch.randn(96, 700), None, storage, native.panel_width)
    x = torch.randn(600, 700)
    together = native.packed_linear(x, packed)
    for rows in (slice(0, 1), slice(5, 13), slice(100, 230)):
        assert torch.equal(native.packed_linear(x[rows], packed), together[rows])


@pytest.mark.parametrize(
    ("storage", "limit"),
    [
        (WeightFormat.BF16, 3e-3),
        (WeightFormat.INT8_WEIGHT_ONLY, 1.1e-2),
        (WeightFormat.INT8, 1.5e-2),
        (WeightFormat.INT4, 1e-1),
    ],
)
def test_error_of_a_smaller_storage(native: NativeOps, storage: WeightFormat, limit: float) -> None:
    """Relative to the product's size, for weights as a normal distribution gives them."""
    weight, x = torch.randn(512, 768), torch.randn(64, 768)
    packed = ops.PackedWeight.pack(weight, None, storage, native.panel_width)
    exact = x @ weight.T
    error = native.packed_linear(x, packed) - exact
    assert float(error.norm() / exact.norm()) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_joined_and_the_largest_number_found(
    native: NativeOps, dtype: torch.dtype
) -> None:
    x, y = torch.randn(3, 700).to(dtype), torch.randn(3, 11).to(dtype)
    joined = native.join(x, y)
    assert torch.equal(joined, reference.join(x, y))
    joined[0, 300] = joined[0, 5] = joined[0].max() + 1  # of equal ones the first
    joined[1] = -torch.inf
    joined[2, 710] = torch.inf
    assert native.largest(joined).tolist() == reference.largest(joined).tolist() == [5, 0, 710]


@TYPES
@pytest.mark.parametrize(
    ("head_dim", "ratio", "options"),
    covering([8, 64, 80], [1, 3, 9, 17], [{}, {"sliding_window": 37}, {"soft_cap": 3.0}]),
    ids=str,
)
def test_paged_attention(
    head_dim: int, ratio: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    """Spans that are joined, tiles that end within a panel, decodes beside prompts, padding."""
    query_lens, seq_lens = [1, 150, 1, 0, 2, 1, 70], [1300, 150, 512, 0, 9, 1, 201]
    num_kv_heads, block_size = 2, 8
    num_blocks = sum(-(-seq_len // block_size) for seq_len in seq_lens) + 2
    table = make_tables(seq_lens, block_size, num_blocks)
    cache = make_cache(num_blocks, 2, num_kv_heads, block_size, head_dim)[:, 1]
    slots = make_metadata(seq_lens, seq_lens, table, block_size).slot_mapping
    key, value = torch.randn(2, len(slots), num_kv_heads, head_dim)
    reference.store_kv(key, value, cache, slots)
    metadata = make_metadata(query_lens, seq_lens, table, block_size, num_padding=3)
    query = torch.randn(metadata.num_tokens, num_kv_heads * ratio, head_dim).to(dtype)
    cache = cache.to(dtype)
    backend = NativeAttention()
    backend.plan(metadata)
    found = backend.run(query, cache, metadata, AttentionOptions(scale=0.2, **options))  # type: ignore[arg-type]
    expected = reference.paged_attention(
        *(query, cache, table, query_lens, seq_lens),
        scale=0.2,
        **options,  # type: ignore[arg-type]
    )
    close(found, expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda ops, x: ops.rms_norm(x, torch.ones(16, dtype=x.dtype), 1e-6),
        lambda ops, x: ops.silu_mul(x),
    ],
)
def test_what_the_library_does_not_take_is_computed_by_the_reference(
    native: NativeOps, op: Callable[[object, Tensor], Tensor]
) -> None:
    for x in (torch.randn(4, 16).double(), torch.randn(16, 4).T):
        torch.testing.assert_close(op(native, x), op(reference, x), rtol=0, atol=0)


def test_half_precision_activations(native: NativeOps) -> None:
    packed = ops.PackedWeight.pack(torch.randn(20, 8), None, WeightFormat.INT8, native.panel_width)
    x = torch.randn(3, 8).half()
    expected = reference.packed_linear(x, packed)
    torch.testing.assert_close(native.packed_linear(x, packed), expected)
