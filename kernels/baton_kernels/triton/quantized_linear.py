"""Linear layers whose weights have 4 or 8 bits a number, see `baton_kernels.quantized`.

A product is computed turned: rows of the weight times tokens. So the weight is the operand that
comes from registers, in which its codes become numbers, and few tokens fill a tile of 16. Codes
are multiplied as they are, and each group's sum by its scale: a weight is never rounded to the
type of ``x``. Where tokens are so few that they do not fill the GPU, a row's inputs are split, in
as many parts as the weight's shape says; the last part to arrive adds them all, in order.
Refuses to know: layers, formats of checkpoints.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.packed import SUPER_GROUP as _SUPER_GROUP
from baton_kernels.quantized import (
    FLOAT8,
    ROUNDED_BLOCK,
    GroupedWeight,
    QuantizedWeight,
    RoundedWeight,
    largest_of,
)
from baton_kernels.triton.aot import FP8, AotCase
from baton_kernels.triton.launch import Launcher

FEW_TOKENS = 64  # a row's inputs are split for no more
_LEAST_TOKENS = 16
_ROUND_BLOCK = 1024
_WANTED_PROGRAMS = 264  # two for each processor of a large GPU
_LEAST_CHUNKS = 4  # of a part
SUPER_GROUP = tl.constexpr(_SUPER_GROUP)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a product is cut.

    Attributes:
        rows: of the weight.
        tokens: of the inputs.
        num_warps: of a program.
        num_stages: tiles under way.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def grouped_tile(num_tokens: int, side: int) -> ProductTile:
    """Choose the tile of `GroupedWeight`."""
    stages = 4 if side == 64 else 6
    if num_tokens <= FEW_TOKENS:
        return ProductTile(64, tokens_of(num_tokens), 4, stages)
    return ProductTile(128, 128, 8, 4)


def rounded_tile(num_tokens: int) -> ProductTile:
    """Choose the tile of `RoundedWeight`."""
    if num_tokens <= FEW_TOKENS:
        return ProductTile(64, tokens_of(num_tokens), 4, 5)
    return ProductTile(128, 128, 8, 4)


def tokens_of(num_tokens: int) -> int:
    """Return the tokens of a tile for a few of them."""
    return max(_LEAST_TOKENS, triton.next_power_of_2(num_tokens))


def num_parts(num_tokens: int, out_features: int, num_chunks: int, tile: ProductTile) -> int:
    """Return in how many parts a row's inputs are summed."""
    if num_tokens > FEW_TOKENS:
        return 1
    wanted = _WANTED_PROGRAMS // -(-out_features // tile.rows)
    return max(1, min(wanted, num_chunks // _LEAST_CHUNKS))


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See `baton_kernels.reference.quantized_linear`."""
    rows = x.reshape(-1, weight.in_features)
    if isinstance(weight, GroupedWeight):
        out = grouped_linear(rows, weight, bias)
    else:
        out = rounded_linear(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.out_features)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, tile: ProductTile | None = None,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Multiply ``[num_tokens, in_features]``, see `quantized_linear`.

    Args:
        tile: None: as it is chosen.
        parts: likewise.
    """
    num_tokens, out_features = len(x), weight.out_features
    out = x.new_empty(num_tokens, out_features)
    if not num_tokens:
        return out
    tile = tile or grouped_tile(num_tokens, weight.side)
    parts = parts or num_parts(num_tokens, out_features, len(weight.codes), tile)
    scales, minima, factors, minimum_factors = weight.groups.tensors
    sums = None if parts == 1 else x.new_empty(parts, num_tokens, out_features, dtype=torch.float32)
    launcher = _grouped_launcher(weight.bits, weight.side, weight.group_size, tile, _has_asm(x))
    launcher(
        (-(-num_tokens // tile.tokens), -(-out_features // tile.rows), parts),
        (
            *(x, weight.codes, scales, minima, factors, minimum_factors, bias, out, sums),
            weight.arrived,
        ),
        (num_tokens, x.stride(0), weight.in_features, out_features, len(weight.codes)),
    )
    return out


def rounded_linear(
    x: Tensor, weight: RoundedWeight, bias: Tensor | None, tile: ProductTile | None = None,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Multiply ``[num_tokens, in_features]``, rounded token by token, see `quantized_linear`.

    Args:
        tile: None: as it is chosen.
        parts: likewise.
    """
    num_tokens, out_features = len(x), weight.out_features
    out = x.new_empty(num_tokens, out_features)
    if not num_tokens:
        return out
    numbers, scales = round_inputs(x, weight.numbers.dtype, weight.group_size)
    tile = tile or rounded_tile(num_tokens)
    num_chunks = -(-weight.in_features // ROUNDED_BLOCK)
    parts = parts or num_parts(num_tokens, out_features, num_chunks, tile)
    is_grouped = len(weight.scales) > 1
    exact = torch.int32 if weight.numbers.dtype == torch.int8 and not is_grouped else torch.float32
    sums = None if parts == 1 else x.new_empty(parts, num_tokens, out_features, dtype=exact)
    launcher = _rounded_launcher(weight.group_size if is_grouped else 0, tile)
    launcher(
        (-(-num_tokens // tile.tokens), -(-out_features // tile.rows), parts),
        (
            *(numbers, scales, weight.numbers, weight.scales, bias, out, sums),
            weight.arrived,
        ),
        (num_tokens, weight.in_features, out_features, num_chunks),
    )
    return out


def round_inputs(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """See `baton_kernels.quantized.rounded_rows`; but scales are ``[groups, num_tokens]``."""
    num_tokens, size = x.shape
    num_groups = -(-size // group_size)
    numbers = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    scales = x.new_empty(num_groups, num_tokens, dtype=torch.float32)
    block = min(triton.next_power_of_2(min(group_size, size)), _ROUND_BLOCK)
    _round_launcher(block, dtype == torch.int8)(
        (num_tokens, num_groups), (x, numbers, scales),
        (x.stride(0), num_tokens, size, min(group_size, size)),
    )  # fmt: skip
    return numbers, scales


def _has_asm(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float32


@functools.cache
def _grouped_launcher(
    bits: int, side: int, group_size: int, tile: ProductTile, has_asm: bool
) -> Launcher:
    options = {"BITS": bits, "SIDE": side, "GROUP": group_size, "HAS_ASM": has_asm}
    return Launcher(grouped_kernel, **options, **_options(tile))


@functools.cache
def _rounded_launcher(group_size: int, tile: ProductTile) -> Launcher:
    return Launcher(rounded_kernel, GROUP=group_size, BLOCK_K=ROUNDED_BLOCK, **_options(tile))


@functools.cache
def _round_launcher(block: int, is_int8: bool) -> Launcher:
    largest = largest_of(torch.int8 if is_int8 else FLOAT8)
    return Launcher(round_kernel, BLOCK=block, LARGEST=largest, num_warps=4)


def _options(tile: ProductTile) -> dict[str, int]:
    return {
        "BLOCK_N": tile.rows,
        "BLOCK_M": tile.tokens,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _asm_of_codes(kind: str, base: int, one: int, less: int) -> str:
    """Return what makes numbers of the low and the high halves of four bytes.

    A code of 4 bits behind the bits of ``base``, whose own last bit counts 1, is ``base`` plus the
    code; ``less`` is subtracted. Constants are two numbers of ``kind``'s bits each.
    """
    low, high = ("first", "second"), ("first_high", "second_high")
    lines = [
        f".reg .b32 {', '.join(low + high)}, one, less;",
        f"mov.b32 one, {one:#x};",
        f"mov.b32 less, {less:#x};",
        "prmt.b32 first, $4, 0, 0x4140;",
        "prmt.b32 second, $4, 0, 0x4342;",
        *(f"shr.u32 {name}_high, {name}, 4;" for name in low),
        *(f"lop3.b32 {name}, {name}, 0x000f000f, {base:#x}, 0xea;" for name in low + high),
        *(f"fma.rn.{kind}x2 ${place}, {name}, one, less;" for place, name in enumerate(low + high)),
    ]
    return "{ " + " ".join(lines) + " }"


# 128 in bfloat16 and 1,024 in float16, of which a code is subtracted; or 136 and 1,032.
_BF16_FROM_0 = tl.constexpr(_asm_of_codes("bf16", 0x43004300, 0x3F803F80, 0xC300C300))
_BF16_FROM_8 = tl.constexpr(_asm_of_codes("bf16", 0x43004300, 0x3F803F80, 0xC308C308))
_FP16_FROM_0 = tl.constexpr(_asm_of_codes("f16", 0x64006400, 0x3C003C00, 0xE400E400))
_FP16_FROM_8 = tl.constexpr(_asm_of_codes("f16", 0x64006400, 0x3C003C00, 0xE408E408))
_HALVES = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def halves_as_numbers(codes, dtype: tl.constexpr, FROM_0: tl.constexpr, HAS_ASM: tl.constexpr):
    """The codes in the low and in the high halves of bytes, as numbers from 0 or from -8."""
    if HAS_ASM and dtype == tl.bfloat16:
        ASM: tl.constexpr = _BF16_FROM_0 if FROM_0 else _BF16_FROM_8
        low, high = tl.inline_asm_elementwise(
            ASM, _HALVES, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif HAS_ASM and dtype == tl.float16:
        ASM: tl.constexpr = _FP16_FROM_0 if FROM_0 else _FP16_FROM_8
        low, high = tl.inline_asm_elementwise(
            ASM, _HALVES, [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
        if not FROM_0:
            low, high = low - 8, high - 8
        low, high = low.to(dtype), high.to(dtype)
    return low, high


@triton.jit
def group_numbers(ptr, factor_ptr, group, row, is_row, out_features, GROUP: tl.constexpr):
    """Scales, or minima, of one group of some rows."""
    numbers = tl.load(ptr + group * out_features + row, mask=is_row, other=0).to(tl.float32)
    if factor_ptr is not None:
        factor_at = factor_ptr + group * GROUP // SUPER_GROUP * out_features + row
        numbers *= tl.load(factor_at, mask=is_row, other=0).to(tl.float32)
    return numbers


@triton.jit
def add_group(
    total, codes, x, scale_ptr, factor_ptr, minimum_ptr, minimum_factor_ptr, group, row, is_row,
    out_features, GROUP: tl.constexpr,
):  # fmt: skip
    """``total`` plus the sum of some inputs of one group: ``[rows, tokens]``."""
    scale = group_numbers(scale_ptr, factor_ptr, group, row, is_row, out_features, GROUP)
    total += tl.dot(codes, x, input_precision="ieee") * scale[:, None]
    if minimum_ptr is not None:
        minimum = group_numbers(
            minimum_ptr, minimum_factor_ptr, group, row, is_row, out_features, GROUP
        )
        if minimum_factor_ptr is None and minimum_ptr.dtype.element_ty == tl.int8:
            minimum *= scale
        total += minimum[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return total


@triton.jit
def store_sums(
    total, scale, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
):
    """Store ``[rows, tokens]``, or, of a part, keep it; the last part to arrive adds all.

    ``scale``: what the whole sum is multiplied with, or None.
    """
    is_row = row < out_features
    exists = is_row[:, None] & (token < num_tokens)[None, :]
    place = token[None, :].to(tl.int64) * out_features + row[:, None]
    parts = tl.num_programs(2)
    is_last = True
    if sum_ptr is not None:
        size = num_tokens * out_features
        tl.store(sum_ptr + tl.program_id(2) * size + place, total, mask=exists)
        # One thread counts: the barrier puts what all threads stored before its release, and its
        # acquire puts what the other parts stored before the loads of the last one.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
        is_last = is_last == parts - 1
        if is_last:
            tl.store(arrived_ptr + tl.program_id(1), 0)  # for the next launch
            total = tl.zeros_like(total)
            for part in range(parts):
                total += tl.load(sum_ptr + part * size + place, mask=exists, other=0)
    if is_last:
        result = total.to(tl.float32)
        if scale is not None:
            result *= scale
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + row, mask=is_row, other=0)
            result += bias.to(tl.float32)[:, None]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def grouped_kernel(
    x_ptr, code_ptr, scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr, bias_ptr, out_ptr,
    sum_ptr, arrived_ptr, num_tokens, x_stride, in_features, out_features, num_chunks,
    BITS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr, HAS_ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight times some tokens, over some chunks of the inputs."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_row = (token < num_tokens)[None, :], row < out_features
    side = tl.arange(0, SIDE)
    x_at = x_ptr + token[None, :].to(tl.int64) * x_stride + side[:, None]
    code_at = code_ptr + row[:, None].to(tl.int64) * SIDE + side[None, :]
    chunk_size = out_features.to(tl.int64) * SIDE
    CHUNK: tl.constexpr = SIDE * 8 // BITS
    per_part = tl.cdiv(num_chunks, tl.num_programs(2))
    first = tl.program_id(2) * per_part
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in range(first, tl.minimum(first + per_part, num_chunks)):
        codes = tl.load(code_at + chunk * chunk_size, mask=is_row[:, None], other=0)
        start = chunk * CHUNK
        exists = is_token & (side < in_features - start)[:, None]
        x = tl.load(x_at + start, mask=exists, other=0.0)
        if BITS == 4:
            low, high = halves_as_numbers(codes, x.dtype, minimum_ptr is not None, HAS_ASM)
            total = add_group(
                total, low, x, scale_ptr, factor_ptr, minimum_ptr, minimum_factor_ptr,
                start // GROUP, row, is_row, out_features, GROUP,
            )  # fmt: skip
            start += SIDE
            exists = is_token & (side < in_features - start)[:, None]
            x = tl.load(x_at + start, mask=exists, other=0.0)
            has_group = is_row & (start < in_features)  # the last chunk may have but a low one
            total = add_group(
                total, high, x, scale_ptr, factor_ptr, minimum_ptr, minimum_factor_ptr,
                start // GROUP, row, has_group, out_features, GROUP,
            )  # fmt: skip
        else:
            total = add_group(
                total, codes.to(x.dtype), x, scale_ptr, factor_ptr, minimum_ptr,
                minimum_factor_ptr, start // GROUP, row, is_row, out_features, GROUP,
            )  # fmt: skip
    store_sums(
        total, None, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
    )


@triton.jit
def rounded_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, sum_ptr, arrived_ptr,
    num_tokens, in_features, out_features, num_chunks,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some rows of the weight times some tokens; ``GROUP`` 0: one scale for all of a row.

    Integers are summed as integers: whatever their order, the sum is the same.
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_row = token < num_tokens, row < out_features
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token[None, :].to(tl.int64) * in_features + depth[:, None]
    weight_at = weight_ptr + row[:, None].to(tl.int64) * in_features + depth[None, :]
    per_part = tl.cdiv(num_chunks, tl.num_programs(2))
    first = tl.program_id(2) * per_part
    IS_EXACT: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8 and GROUP == 0
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if IS_EXACT else tl.float32)
    for chunk in range(first, tl.minimum(first + per_part, num_chunks)):
        start = chunk * BLOCK_K
        exists = depth < in_features - start
        x = tl.load(x_at + start, mask=is_token[None, :] & exists[:, None], other=0.0)
        weight = tl.load(weight_at + start, mask=is_row[:, None] & exists[None, :], other=0.0)
        if IS_EXACT:
            total = tl.dot(weight, x, total, out_dtype=tl.int32)
        else:
            # Sums of float8 in a matrix unit lose bits: each block's is added outside.
            product = tl.dot(weight, x)
            if GROUP:
                group = start // GROUP
                scale_at = scale_ptr + group * out_features + row
                scale = tl.load(scale_at, mask=is_row, other=0.0)
                x_scale_at = x_scale_ptr + group * num_tokens + token
                x_scale = tl.load(x_scale_at, mask=is_token, other=0.0)
                total += product.to(tl.float32) * (scale[:, None] * x_scale[None, :])
            else:
                total += product
    scale = None
    if GROUP == 0:
        scale = tl.load(scale_ptr + row, mask=is_row, other=0.0)[:, None]
        scale *= tl.load(x_scale_ptr + token, mask=is_token, other=0.0)[None, :]
    store_sums(
        total, scale, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
    )


@triton.jit
def round_kernel(
    x_ptr, number_ptr, scale_ptr, x_stride, num_tokens, size, group_size,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One group of one token: its largest number becomes ``LARGEST``."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * group_size
    end = tl.minimum(first + group_size, size)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_stride + column, mask=column < end, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    limit = tl.max(largest, axis=0)
    # As torch divides: to the nearest.
    factor = tl.div_rn(tl.full((1,), LARGEST, tl.float32), tl.maximum(limit, 1e-30))
    factor = tl.where(limit > 1e-30, factor, 0.0)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_stride + column, mask=column < end, other=0.0)
        numbers = x.to(tl.float32) * factor
        if number_ptr.dtype.element_ty == tl.int8:
            # To the nearest, of two the even one: added to 1.5 * 2^23, a number has no fraction.
            numbers = (numbers + 12582912.0) - 12582912.0
        numbers = tl.clamp(numbers, -LARGEST, LARGEST).to(number_ptr.dtype.element_ty)
        tl.store(number_ptr + token * size + column, numbers, mask=column < end)
    tl.store(scale_ptr + group * num_tokens + token, limit * (1.0 / LARGEST))


def _grouped_case(
    bits: int, side: int, tile: ProductTile, *, minima: bool = False, parts: bool = False,
    x: str = "*bf16", scales: str = "*bf16",
) -> AotCase:  # fmt: skip
    codes = "*u8" if bits == 4 or minima else "*i8"
    types = {
        **{"x_ptr": x, "code_ptr": codes, "scale_ptr": scales, "minimum_ptr": "*i8"},
        **dict.fromkeys(("factor_ptr", "minimum_factor_ptr"), "*bf16"),
        **{"bias_ptr": x, "out_ptr": x, "sum_ptr": "*fp32", "arrived_ptr": "*i32"},
        **{"num_tokens": "i32", "num_chunks": "i32"},
        **dict.fromkeys(("x_stride", "in_features", "out_features"), "i32:16"),
    }
    constants: dict[str, int | float | bool | str | None] = {
        **{"BITS": bits, "SIDE": side, "GROUP": max(side, 32) if minima else 128},
        **{"HAS_ASM": x != "*fp32", "BLOCK_N": tile.rows, "BLOCK_M": tile.tokens},
        **dict.fromkeys(("factor_ptr", "minimum_factor_ptr", "bias_ptr")),
    }
    if not minima:
        constants["minimum_ptr"] = None
    elif scales == "*i8":
        del constants["factor_ptr"], constants["minimum_factor_ptr"]
    if not parts:
        constants["sum_ptr"] = None
    types |= dict.fromkeys(constants, "constexpr")
    name = f"grouped_linear {bits} bits, {side} x {tile.tokens} {x[1:]}"
    name += ", minima" * minima + ", parts" * parts + f", scales {scales[1:]}"
    return AotCase(name, grouped_kernel, types, constants, tile.num_warps, tile.num_stages)


def _rounded_case(number: str, tile: ProductTile, group: int, *, parts: bool = False) -> AotCase:
    is_exact = number == "i8" and not group
    types = {
        **{"x_ptr": f"*{number}", "x_scale_ptr": "*fp32", "weight_ptr": f"*{number}"},
        **{"scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"},
        **{"sum_ptr": "*i32" if is_exact else "*fp32", "arrived_ptr": "*i32"},
        **{"num_tokens": "i32", "num_chunks": "i32"},
        **dict.fromkeys(("in_features", "out_features"), "i32:16"),
    }
    constants: dict[str, int | float | bool | str | None] = {
        **{"GROUP": group, "BLOCK_K": ROUNDED_BLOCK, "bias_ptr": None},
        **{"BLOCK_N": tile.rows, "BLOCK_M": tile.tokens},
    }
    if not parts:
        constants["sum_ptr"] = None
    types |= dict.fromkeys(constants, "constexpr")
    name = f"rounded_linear {number} x {tile.tokens}" + f", groups of {group}" * bool(group)
    capabilities = (90,) if number == FP8 else (80, 90)
    return AotCase(
        name + ", parts" * parts, rounded_kernel, types, constants, tile.num_warps,
        tile.num_stages, capabilities,
    )  # fmt: skip


def _round_case(number: str) -> AotCase:
    types = {
        **{"x_ptr": "*bf16", "number_ptr": f"*{number}", "scale_ptr": "*fp32"},
        **dict.fromkeys(("x_stride", "size", "group_size"), "i32:16"),
        **{"num_tokens": "i32", "BLOCK": "constexpr", "LARGEST": "constexpr"},
    }
    largest = largest_of(torch.int8 if number == "i8" else FLOAT8)
    constants = {"BLOCK": _ROUND_BLOCK, "LARGEST": largest}
    capabilities = (90,) if number == FP8 else (80, 90)
    return AotCase(
        f"round_inputs {number}", round_kernel, types, constants, capabilities=capabilities
    )


_MANY_TOKENS = 2048
AOT_CASES = (
    *(
        _grouped_case(4, 64, grouped_tile(tokens, 64), parts=tokens <= FEW_TOKENS)
        for tokens in (1, FEW_TOKENS, _MANY_TOKENS)
    ),
    _grouped_case(4, 64, grouped_tile(1, 64), parts=True, x="*fp16", scales="*fp16"),
    _grouped_case(4, 64, grouped_tile(1, 64), minima=True, parts=True),
    *(
        _grouped_case(
            4, 32, grouped_tile(tokens, 32), minima=True, parts=tokens <= FEW_TOKENS, scales="*i8"
        )
        for tokens in (1, _MANY_TOKENS)
    ),
    *(
        _grouped_case(8, 64, grouped_tile(tokens, 64), parts=tokens <= FEW_TOKENS)
        for tokens in (1, _MANY_TOKENS)
    ),
    *(
        _rounded_case(number, rounded_tile(tokens), group, parts=tokens <= FEW_TOKENS)
        for number in ("i8", FP8)
        for group in (0, ROUNDED_BLOCK)
        for tokens in (1, _MANY_TOKENS)
        if number == FP8 or not group
    ),
    _round_case("i8"),
    _round_case(FP8),
)
