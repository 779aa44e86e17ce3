"""Linear layers with quantized weights, in the layouts of `baton_kernels.quantized`.

The product is computed transposed: rows of the weight times tokens. The weight is then the operand
in registers, where its codes are converted to numbers, and a tile needs only 16 tokens. If all
codes of a chunk share a scale, the kernel multiplies the codes without the scale, and scales their
sum; otherwise, each plane of codes is scaled and converted to the dtype of ``x``. With few tokens,
a row's inputs are summed in several parts, whose number depends on the weight's shape; the program
that finishes last adds all parts, in order.

For a prompt, the whole weight (codes or float8) is first converted in memory, because the GPU
vendor's matrix product is then faster. Refuses to know: layers, formats of checkpoints.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton_kernels.packed import FLOAT8
from baton_kernels.packed import SUPER_GROUP as _SUPER_GROUP
from baton_kernels.quantized import (
    ROUNDED_BLOCK,
    SIDE,
    GroupedWeight,
    QuantizedWeight,
    RoundedWeight,
    largest_of,
)
from baton_kernels.triton.aot import FP8, AotCase
from baton_kernels.triton.attention_tile import padded_side
from baton_kernels.triton.launch import Launcher

# Maximum number of tokens of a tile, and of a batch for which a row's inputs are summed in several
# parts.
FEW_TOKENS = 64
# Batches of at least this many tokens are computed with a weight that is first unpacked in memory.
# The numbers follow from measured times, and from the memory that an unpacked weight takes.
GROUPED_UNPACKED_FROM, FLOAT8_UNPACKED_FROM = 129, 513
_ROUND_BLOCK = 1024
WANTED_PROGRAMS = {4: 512, 8: 384}  # number of programs that fill a GPU, by bits of a code
WANTED_ROUNDED = 264
_LEAST_CHUNKS = 4  # fewest chunks of inputs in a part
_STAGE_BYTES = 60 * 2**10  # bytes of shared memory for all stages
_UNPACK_ROWS = 16
_ALL = 2**30  # larger than any row: as a group size, it makes a row one group
SUPER_GROUP = tl.constexpr(_SUPER_GROUP)
WORDS = tl.constexpr(SIDE)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile sizes of a matrix product.

    Attributes:
        rows: number of the weight's rows in a tile.
        tokens: number of tokens in a tile.
        num_warps: number of warps of a program.
        num_stages: number of tiles that are being loaded at once.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def grouped_tile(num_tokens: int, bits: int, element_size: int) -> ProductTile:
    """Choose the tile sizes for a product with a `GroupedWeight`."""
    rows, tokens = 64, tokens_of(num_tokens)
    stage = 4 * SIDE * rows + SIDE * 32 // bits * tokens * element_size
    return ProductTile(rows, tokens, 4, max(2, min(6, _STAGE_BYTES // stage)))


def rounded_tile(num_tokens: int) -> ProductTile:
    """Choose the tile sizes for a product with a `RoundedWeight`."""
    if num_tokens <= FEW_TOKENS:
        return ProductTile(64, tokens_of(num_tokens), 4, 6 if num_tokens <= 16 else 4)
    return ProductTile(128, 128, 8, 3)


def tokens_of(num_tokens: int) -> int:
    """Return the number of tokens in a tile of a small batch."""
    return min(FEW_TOKENS, padded_side(num_tokens))


def num_parts(
    out_features: int, num_chunks: int, tile: ProductTile, wanted: int, num_tokens: int
) -> int:
    """Return in how many parts a row's inputs are summed, so that about ``wanted`` programs run."""
    if num_tokens > FEW_TOKENS:
        return 1
    return max(1, min(wanted // -(-out_features // tile.rows), num_chunks // _LEAST_CHUNKS))


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `baton_kernels.reference.quantized_linear` with Triton."""
    rows = x.reshape(-1, weight.in_features)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if len(rows) >= _unpacked_from(weight):
        if isinstance(weight, RoundedWeight):
            rows = _rounded_in_memory(rows, weight.group_size)
        out = functional.linear(rows, unpacked(weight, x.dtype), bias)
    elif isinstance(weight, GroupedWeight):
        out = grouped_linear(rows, weight, bias)
    elif len(rows) > FEW_TOKENS and _has_vendors_product(rows, weight):
        out = scaled_mm(rows, weight, bias)
    else:
        out = rounded_linear(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.out_features)


def _unpacked_from(weight: QuantizedWeight) -> int:
    """Return from how many tokens on the weight is unpacked before the product."""
    if isinstance(weight, GroupedWeight):
        return GROUPED_UNPACKED_FROM
    has_groups = weight.numbers.dtype == FLOAT8 and len(weight.scales) > 1
    return FLOAT8_UNPACKED_FROM if has_groups else _ALL


def _rounded_in_memory(x: Tensor, group_size: int) -> Tensor:
    """Round inputs to float8 group by group, and convert them back to the dtype of ``x``."""
    numbers, scales = round_inputs(x, FLOAT8, group_size)
    return unpacked(RoundedWeight(numbers, scales, group_size, scales), x.dtype)


def _has_vendors_product(x: Tensor, weight: RoundedWeight) -> bool:
    is_taken = x.is_cuda and weight.numbers.dtype == FLOAT8 and x.dtype == torch.bfloat16
    is_taken = is_taken and not any(size % 16 for size in weight.numbers.shape)
    return is_taken and _scales_rows(x.device)


@functools.cache
def _scales_rows(device: torch.device) -> bool:
    """Return whether the GPU vendor's float8 product supports a scale per row on this device."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def scaled_mm(x: Tensor, weight: RoundedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply rounded inputs by a float8 weight with the GPU vendor's library.

    There is a scale per row of the weight, and per token.
    """
    numbers, scales = round_inputs(x, FLOAT8, weight.group_size)
    product: Tensor = torch._scaled_mm(
        *(numbers, weight.numbers.T, scales.view(-1, 1), weight.scales.view(1, -1)),
        bias=bias,
        out_dtype=x.dtype,
    )
    return product


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, tile: ProductTile | None = None,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Multiply ``x``, ``[num_tokens, in_features]``, by a `GroupedWeight`.

    Args:
        tile: tile sizes; None: they are chosen here.
        parts: number of parts in which a row's inputs are summed; None: chosen here.
    """
    num_tokens, out_features = len(x), weight.out_features
    out = x.new_empty(num_tokens, out_features)
    if not num_tokens:
        return out
    bits, num_chunks = weight.bits, len(weight.codes)
    tile = tile or grouped_tile(num_tokens, bits, x.itemsize)
    parts = parts or num_parts(out_features, num_chunks, tile, WANTED_PROGRAMS[bits], num_tokens)
    grid, sums = _grid_and_sums(out, tile, parts, torch.float32)
    scales, minima, factors, minimum_factors = weight.groups.tensors
    launcher = _grouped_launcher(
        bits, _group_of(weight), weight.in_features % weight.chunk_size == 0, _has_asm(x), tile
    )
    launcher(
        grid,
        (
            *(x, weight.codes, scales, minima, factors, minimum_factors, bias, out, sums),
            weight.arrived,
        ),
        (num_tokens, x.stride(0), weight.in_features, out_features, num_chunks),
    )
    return out


def _grid_and_sums(
    out: Tensor, tile: ProductTile, parts: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], Tensor | None]:
    """Return the grid of a product, and a buffer for the sums of parts; None: only one part."""
    num_tokens, out_features = out.shape
    assert parts == 1 or num_tokens <= tile.tokens, "parts are counted for one tile of tokens"
    grid = (-(-num_tokens // tile.tokens), -(-out_features // tile.rows), parts)
    return grid, None if parts == 1 else out.new_empty(parts, *out.shape, dtype=dtype)


def unpacked(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Convert a whole weight to ``dtype``: ``[out_features, in_features]``."""
    out_features, size = weight.out_features, weight.in_features
    out = torch.empty(out_features, size, dtype=dtype, device=weight.tensors[0].device)
    rows = -(-out_features // _UNPACK_ROWS)
    if isinstance(weight, RoundedWeight):
        _unpack_float8_launcher(weight.group_size)(
            (rows, -(-size // ROUNDED_BLOCK)),
            (weight.numbers, weight.scales, out),
            (size, out_features),
        )
        return out
    scales, minima, factors, minimum_factors = weight.groups.tensors
    has_asm = _has_asm(out)
    _unpack_launcher(weight.bits, _group_of(weight), has_asm)(
        (rows, len(weight.codes)),
        (weight.codes, scales, minima, factors, minimum_factors, out),
        (size, out_features),
    )
    return out


def _group_of(weight: GroupedWeight) -> int:
    return weight.group_size if len(weight.groups.scales) > 1 else _ALL


def rounded_linear(
    x: Tensor, weight: RoundedWeight, bias: Tensor | None, tile: ProductTile | None = None,
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """Round ``x``, ``[num_tokens, in_features]``, and multiply it by a `RoundedWeight`.

    Args:
        tile: tile sizes; None: they are chosen here.
        parts: number of parts in which a row's inputs are summed; None: chosen here.
    """
    num_tokens, out_features = len(x), weight.out_features
    out = x.new_empty(num_tokens, out_features)
    if not num_tokens:
        return out
    numbers, scales = round_inputs(x, weight.numbers.dtype, weight.group_size)
    tile = tile or rounded_tile(num_tokens)
    num_chunks = -(-weight.in_features // ROUNDED_BLOCK)
    parts = parts or num_parts(out_features, num_chunks, tile, WANTED_ROUNDED, num_tokens)
    is_grouped = len(weight.scales) > 1
    exact = torch.int32 if weight.numbers.dtype == torch.int8 and not is_grouped else torch.float32
    grid, sums = _grid_and_sums(out, tile, parts, exact)
    launcher = _rounded_launcher(weight.group_size if is_grouped else 0, tile)
    launcher(
        grid,
        (
            *(numbers, scales, weight.numbers, weight.scales, bias, out, sums),
            weight.arrived,
        ),
        (num_tokens, weight.in_features, out_features, num_chunks),
    )
    return out


def round_inputs(x: Tensor, dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Compute `baton_kernels.quantized.rounded_rows` with Triton; scales are transposed."""
    num_tokens, size = x.shape
    num_groups = -(-size // group_size)
    numbers = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    scales = x.new_empty(num_groups, num_tokens, dtype=torch.float32)
    block = min(padded_side(min(group_size, size)), _ROUND_BLOCK)
    _round_launcher(block, dtype == torch.int8)(
        (num_tokens, num_groups), (x, numbers, scales),
        (x.stride(0), num_tokens, size, min(group_size, size)),
    )  # fmt: skip
    return numbers, scales


def _has_asm(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float32


@functools.cache
def _grouped_launcher(
    bits: int, group: int, is_even: bool, has_asm: bool, tile: ProductTile
) -> Launcher:
    options = {"BITS": bits, "GROUP": group, "IS_EVEN": is_even, "HAS_ASM": has_asm}
    return Launcher(grouped_kernel, **options, **_options(tile))


@functools.cache
def _unpack_launcher(bits: int, group: int, has_asm: bool) -> Launcher:
    options = {"BITS": bits, "GROUP": group, "HAS_ASM": has_asm}
    return Launcher(unpack_kernel, **options, BLOCK_N=_UNPACK_ROWS, num_warps=4)


@functools.cache
def _unpack_float8_launcher(group: int) -> Launcher:
    options = {"GROUP": group, "BLOCK_N": _UNPACK_ROWS, "BLOCK_K": ROUNDED_BLOCK}
    return Launcher(unpack_float8_kernel, **options, num_warps=4)


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


def _nibbles(kind: str, base: int, one: int, less: int) -> str:
    """Return assembly code that unpacks two words into two numbers of each of eight planes.

    The lowest bit of the float ``base`` is worth 1, so ``base`` with a code in its low bits is the
    number ``base`` plus the code. Then ``less``, a negative number, is added. Each constant is a
    word with two equal numbers of type ``kind``.
    """
    names = [f"plane{place}" for place in range(8)]
    halves = {0: "prmt.b32 plane0, $8, $9, 0x5410;", 4: "prmt.b32 plane4, $8, $9, 0x7632;"}
    lines = [f".reg .b32 {', '.join(names)}, one, less;"]
    lines += [f"mov.b32 one, {one:#x};", f"mov.b32 less, {less:#x};"]
    for place, name in enumerate(names):
        first = place // 4 * 4
        lines.append(halves.get(place, f"shr.u32 {name}, {names[first]}, {4 * (place - first)};"))
    for place, name in enumerate(names):
        lines.append(f"lop3.b32 {name}, {name}, 0x000f000f, {base:#x}, 0xea;")
        lines.append(f"fma.rn.{kind}x2 ${place}, {name}, one, less;")
    return "{ " + " ".join(lines) + " }"


def _bytes_bf16(less: int) -> str:
    """Return assembly code that unpacks two numbers of each of four planes to bfloat16.

    The float32 2^23 with a code in its lowest bits is the number 2^23 plus the code. Then ``less``,
    a negative number, is added, and the sum is converted.
    """
    lines = [".reg .b32 base; .reg .f32 first, second;", "mov.b32 base, 0x4b000000;"]
    for place in range(4):
        for name, word in (("first", "$4"), ("second", "$5")):
            lines.append(
                f"{{ .reg .b32 t; prmt.b32 t, {word}, base, {0x7650 + place:#x};"
                f" mov.b32 {name}, t; }}"
            )
            lines.append(f"add.rn.f32 {name}, {name}, 0f{less:08x};")
        lines.append(f"cvt.rn.bf16x2.f32 ${place}, second, first;")
    return "{ " + " ".join(lines) + " }"


def _bytes_fp16(less: int) -> str:
    """Return assembly code that unpacks two numbers of each of four planes to float16."""
    lines = [".reg .b32 both, one, less;", "mov.b32 one, 0x3c003c00;", f"mov.b32 less, {less:#x};"]
    for place in range(4):
        lines.append(f"prmt.b32 both, $4, $5, {(4 + place) << 8 | place:#x};")
        lines.append("lop3.b32 both, both, 0x00ff00ff, 0x64006400, 0xea;")
        lines.append(f"fma.rn.f16x2 ${place}, both, one, less;")
    return "{ " + " ".join(lines) + " }"


# The base is 128 in bfloat16 and 1,024 in float16. A code is unpacked to itself or, without
# FROM_0, to the code minus 8 (4 bits) or minus 128 (8 bits).
_BF16_4_FROM_0 = tl.constexpr(_nibbles("bf16", 0x43004300, 0x3F803F80, 0xC300C300))
_BF16_4 = tl.constexpr(_nibbles("bf16", 0x43004300, 0x3F803F80, 0xC308C308))
_FP16_4_FROM_0 = tl.constexpr(_nibbles("f16", 0x64006400, 0x3C003C00, 0xE400E400))
_FP16_4 = tl.constexpr(_nibbles("f16", 0x64006400, 0x3C003C00, 0xE408E408))
_BF16_8_FROM_0 = tl.constexpr(_bytes_bf16(0xCB000000))
_BF16_8 = tl.constexpr(_bytes_bf16(0xCB000080))
_FP16_8_FROM_0 = tl.constexpr(_bytes_fp16(0xE400E400))
_FP16_8 = tl.constexpr(_bytes_fp16(0xE480E480))
# Results must not share registers with words, because results are written while words are still
# read.
_EIGHT_OF_TWO = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
_FOUR_OF_TWO = tl.constexpr("=&r,=&r,=&r,=&r,r,r")


@triton.jit
def plane_of(
    words, place: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr, FROM_0: tl.constexpr
):
    """Unpack the numbers of one plane, without assembly code."""
    number = ((words >> (place * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    if not FROM_0:
        number -= 1 << (BITS - 1)
    return number.to(dtype)


@triton.jit
def planes_of_4_bits(words, dtype: tl.constexpr, FROM_0: tl.constexpr, HAS_ASM: tl.constexpr):
    """Unpack words of 4-bit codes into the numbers of eight planes."""
    if HAS_ASM and dtype == tl.bfloat16:
        planes = tl.inline_asm_elementwise(
            _BF16_4_FROM_0 if FROM_0 else _BF16_4, _EIGHT_OF_TWO, [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASM:
        planes = tl.inline_asm_elementwise(
            _FP16_4_FROM_0 if FROM_0 else _FP16_4, _EIGHT_OF_TWO, [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = (
            plane_of(words, 0, dtype, 4, FROM_0), plane_of(words, 1, dtype, 4, FROM_0),
            plane_of(words, 2, dtype, 4, FROM_0), plane_of(words, 3, dtype, 4, FROM_0),
            plane_of(words, 4, dtype, 4, FROM_0), plane_of(words, 5, dtype, 4, FROM_0),
            plane_of(words, 6, dtype, 4, FROM_0), plane_of(words, 7, dtype, 4, FROM_0),
        )  # fmt: skip
    return planes


@triton.jit
def planes_of_8_bits(words, dtype: tl.constexpr, FROM_0: tl.constexpr, HAS_ASM: tl.constexpr):
    """Unpack words of 8-bit codes into the numbers of four planes."""
    if HAS_ASM and dtype == tl.bfloat16:
        planes = tl.inline_asm_elementwise(
            _BF16_8_FROM_0 if FROM_0 else _BF16_8, _FOUR_OF_TWO, [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASM:
        planes = tl.inline_asm_elementwise(
            _FP16_8_FROM_0 if FROM_0 else _FP16_8, _FOUR_OF_TWO, [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = (
            plane_of(words, 0, dtype, 8, FROM_0), plane_of(words, 1, dtype, 8, FROM_0),
            plane_of(words, 2, dtype, 8, FROM_0), plane_of(words, 3, dtype, 8, FROM_0),
        )  # fmt: skip
    return planes


@triton.jit
def group_numbers(ptr, factor_ptr, group, row, out_features, GROUP: tl.constexpr):
    """Load the scales (or minima) of one group for some rows, times their factors, in float32."""
    numbers = tl.load(ptr + group * out_features + row).to(tl.float32)
    if factor_ptr is not None:
        factor_at = factor_ptr + group * GROUP // SUPER_GROUP * out_features + row
        numbers *= tl.load(factor_at).to(tl.float32)
    return numbers


@triton.jit
def scale_and_minimum(place: tl.constexpr, at, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return scale and minimum of some rows in a plane's group; without minima, the scale twice."""
    chunk, groups, row, in_features, out_features = at
    scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr = groups
    first = chunk * (512 // BITS) + place * 16
    # In the last chunk, planes may have no inputs; they get the last group.
    group = tl.minimum(first, in_features - 1) // GROUP
    scale = group_numbers(scale_ptr, factor_ptr, group, row, out_features, GROUP)
    minimum = scale
    if minimum_ptr is not None:
        minimum = group_numbers(minimum_ptr, minimum_factor_ptr, group, row, out_features, GROUP)
        if minimum_factor_ptr is None and minimum_ptr.dtype.element_ty == tl.int8:
            minimum *= scale
    return scale, minimum


@triton.jit
def scaled(codes, of_group, HAS_MINIMA: tl.constexpr):
    """Scale one plane's numbers in float32, add minima, and round to the dtype of ``codes``."""
    numbers = codes.to(tl.float32) * of_group[0][:, None]
    if HAS_MINIMA:
        numbers += of_group[1][:, None]
    return numbers.to(codes.dtype)


@triton.jit
def numbers_of(
    words, at, dtype: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    IS_SCALED: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Unpack a chunk's codes to numbers, ``[rows, inputs]``, scaled if ``IS_SCALED``.

    Args:
        at: index of the chunk, pointers to the groups' tensors, the rows, and the numbers of all
            inputs and all rows.

    Planes are joined in an order that leaves each number in the register where it was unpacked.
    """
    if BITS == 4:
        p = planes_of_4_bits(words, dtype, HAS_MINIMA, HAS_ASM)
        if IS_SCALED:
            # If several planes are in one group, they share scale and minimum.
            g0 = scale_and_minimum(0, at, 4, GROUP)
            g4 = scale_and_minimum(4, at, 4, GROUP) if GROUP <= 64 else g0
            g2 = scale_and_minimum(2, at, 4, GROUP) if GROUP <= 32 else g0
            g6 = scale_and_minimum(6, at, 4, GROUP) if GROUP <= 32 else g4
            g1 = scale_and_minimum(1, at, 4, GROUP) if GROUP == 16 else g0
            g3 = scale_and_minimum(3, at, 4, GROUP) if GROUP == 16 else g2
            g5 = scale_and_minimum(5, at, 4, GROUP) if GROUP == 16 else g4
            g7 = scale_and_minimum(7, at, 4, GROUP) if GROUP == 16 else g6
            p = (
                scaled(p[0], g0, HAS_MINIMA), scaled(p[1], g1, HAS_MINIMA),
                scaled(p[2], g2, HAS_MINIMA), scaled(p[3], g3, HAS_MINIMA),
                scaled(p[4], g4, HAS_MINIMA), scaled(p[5], g5, HAS_MINIMA),
                scaled(p[6], g6, HAS_MINIMA), scaled(p[7], g7, HAS_MINIMA),
            )  # fmt: skip
        even = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
        odd = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
        numbers = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    else:
        p = planes_of_8_bits(words, dtype, HAS_MINIMA, HAS_ASM)
        if IS_SCALED:
            g0 = scale_and_minimum(0, at, 8, GROUP)
            g2 = scale_and_minimum(2, at, 8, GROUP) if GROUP <= 32 else g0
            g1 = scale_and_minimum(1, at, 8, GROUP) if GROUP == 16 else g0
            g3 = scale_and_minimum(3, at, 8, GROUP) if GROUP == 16 else g2
            p = (
                scaled(p[0], g0, HAS_MINIMA), scaled(p[1], g1, HAS_MINIMA),
                scaled(p[2], g2, HAS_MINIMA), scaled(p[3], g3, HAS_MINIMA),
            )  # fmt: skip
        numbers = tl.permute(tl.join(tl.join(p[0], p[2]), tl.join(p[1], p[3])), (0, 2, 3, 1))
    return tl.reshape(numbers, (words.shape[0], 512 // BITS))


@triton.jit
def store_sums(
    total, scale, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
):
    """Store sums, ``[rows, tokens]``, as results.

    If there are several parts, each program leaves its part's sums in a buffer, and the program
    that finishes last adds all parts and stores the results.

    Args:
        scale: factor of the complete sum; None: 1.
    """
    is_row = row < out_features
    exists = is_row[:, None] & (token < num_tokens)[None, :]
    place = token[None, :].to(tl.int64) * out_features + row[:, None]
    parts = tl.num_programs(2)
    is_last = True
    if sum_ptr is not None:
        size = num_tokens * out_features
        tl.store(sum_ptr + tl.program_id(2) * size + place, total, mask=exists)
        # One thread counts finished parts. The barrier orders this program's stores before the
        # release; the acquire orders other parts' stores before the last part's loads.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
        is_last = is_last == parts - 1
        if is_last:
            tl.store(arrived_ptr + tl.program_id(1), 0)  # zero again, for the next launch
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


# The number of tokens is not specialized, because another number must not recompile the kernel
# while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def grouped_kernel(
    x_ptr, code_ptr, scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr, bias_ptr, out_ptr,
    sum_ptr, arrived_ptr, num_tokens, x_stride, in_features, out_features, num_chunks,
    BITS: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr, HAS_ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of a `GroupedWeight` by BLOCK_M tokens, over one part of the inputs."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Out-of-range rows and tokens load the last row or token; their results are not stored.
    known = tl.minimum(row, out_features - 1)
    CHUNK: tl.constexpr = 512 // BITS
    depth = tl.arange(0, CHUNK)
    x_at = x_ptr + tl.minimum(token, num_tokens - 1)[None, :].to(tl.int64) * x_stride
    x_at += depth[:, None]
    code_at = code_ptr + known[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    chunk_words = tl.cast(out_features, tl.int64) * WORDS
    per_part = tl.cdiv(num_chunks, tl.num_programs(2))
    first = tl.program_id(2) * per_part
    groups = (scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr)
    HAS_MINIMA: tl.constexpr = minimum_ptr is not None
    IS_SCALED: tl.constexpr = GROUP < CHUNK or HAS_MINIMA
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in range(first, tl.minimum(first + per_part, num_chunks)):
        words = tl.load(code_at + chunk * chunk_words)
        if IS_EVEN:
            x = tl.load(x_at + chunk * CHUNK)
        else:
            exists = depth < in_features - chunk * CHUNK
            x = tl.load(x_at + chunk * CHUNK, mask=exists[:, None], other=0.0)
        at = (chunk, groups, known, in_features, out_features)
        numbers = numbers_of(words, at, x.dtype, BITS, GROUP, IS_SCALED, HAS_MINIMA, HAS_ASM)
        if IS_SCALED:
            total = tl.dot(numbers, x, total, input_precision="ieee")
        else:
            group = chunk * CHUNK // GROUP
            scale = group_numbers(scale_ptr, factor_ptr, group, known, out_features, GROUP)
            total += tl.dot(numbers, x, input_precision="ieee") * scale[:, None]
    store_sums(
        total, None, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
    )


@triton.jit
def unpack_kernel(
    code_ptr, scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr, out_ptr, in_features,
    out_features, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Convert one chunk of BLOCK_N rows of a `GroupedWeight` to numbers in memory."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    known = tl.minimum(row, out_features - 1)
    code_at = code_ptr + (chunk.to(tl.int64) * out_features + known[:, None]) * WORDS
    words = tl.load(code_at + tl.arange(0, WORDS)[None, :])
    groups = (scale_ptr, minimum_ptr, factor_ptr, minimum_factor_ptr)
    at = (chunk, groups, known, in_features, out_features)
    HAS_MINIMA: tl.constexpr = minimum_ptr is not None
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    numbers = numbers_of(words, at, dtype, BITS, GROUP, True, HAS_MINIMA, HAS_ASM)
    column = chunk * (512 // BITS) + tl.arange(0, 512 // BITS)
    exists = (row < out_features)[:, None] & (column < in_features)[None, :]
    out_at = out_ptr + row[:, None].to(tl.int64) * in_features + column[None, :]
    tl.store(out_at, numbers, mask=exists)


@triton.jit
def unpack_float8_kernel(
    number_ptr, scale_ptr, out_ptr, in_features, out_features,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Convert BLOCK_K float8 inputs of one group to scaled numbers in memory, for BLOCK_N rows."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_row = row < out_features
    exists = is_row[:, None] & (column < in_features)[None, :]
    place = row[:, None].to(tl.int64) * in_features + column[None, :]
    group = tl.program_id(1) * BLOCK_K // GROUP
    scale = tl.load(scale_ptr + group * out_features + row, mask=is_row, other=0.0)
    numbers = tl.load(number_ptr + place, mask=exists, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + place, numbers.to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def rounded_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, sum_ptr, arrived_ptr,
    num_tokens, in_features, out_features, num_chunks,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_N rows of a `RoundedWeight` by BLOCK_M tokens, over one part of the inputs.

    ``GROUP`` is 0 if there is one scale per row. Products of int8 are summed as integers, so that
    the order does not matter.
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
    row_scale = tl.load(scale_ptr + row, mask=is_row, other=0.0)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if IS_EXACT else tl.float32)
    for chunk in range(first, tl.minimum(first + per_part, num_chunks)):
        start = chunk * BLOCK_K
        exists = depth < in_features - start
        x = tl.load(x_at + start, mask=is_token[None, :] & exists[:, None], other=0.0)
        weight = tl.load(weight_at + start, mask=is_row[:, None] & exists[None, :], other=0.0)
        if IS_EXACT:
            total = tl.dot(weight, x, total, out_dtype=tl.int32)
        else:
            # Matrix units lose bits when they sum products of float8, so the sums of blocks are
            # added outside. Scaling in between keeps the compiler from merging both additions.
            product = tl.dot(weight, x)
            if GROUP:
                group = start // GROUP
                scale_at = scale_ptr + group * out_features + row
                scale = tl.load(scale_at, mask=is_row, other=0.0)
                x_scale_at = x_scale_ptr + group * num_tokens + token
                x_scale = tl.load(x_scale_at, mask=is_token, other=0.0)
                total += product.to(tl.float32) * (scale[:, None] * x_scale[None, :])
            else:
                total += product.to(tl.float32) * row_scale
    scale = None
    if GROUP == 0:
        scale = row_scale if IS_EXACT else tl.full((BLOCK_N, 1), 1.0, tl.float32)
        scale *= tl.load(x_scale_ptr + token, mask=is_token, other=0.0)[None, :]
    store_sums(
        total, scale, sum_ptr, bias_ptr, out_ptr, arrived_ptr, token, row, num_tokens, out_features
    )


@triton.jit(do_not_specialize=["num_tokens"])
def round_kernel(
    x_ptr, number_ptr, scale_ptr, x_stride, num_tokens, size, group_size,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Round one group of a token's inputs; its largest number is scaled to ``LARGEST``."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * group_size
    end = tl.minimum(first + group_size, size)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_stride + column, mask=column < end, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    limit = tl.max(largest, axis=0)
    # rounds to nearest, as torch's division does
    factor = tl.div_rn(tl.full((1,), LARGEST, tl.float32), tl.maximum(limit, 1e-30))
    factor = tl.where(limit > 1e-30, factor, 0.0)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * x_stride + column, mask=column < end, other=0.0)
        x = x.to(tl.float32)
        if number_ptr.dtype.element_ty == tl.int8:
            # Rounds to nearest, ties to even: floats near 1.5 * 2^23 have no fraction.
            shift = tl.full((BLOCK,), 12582912.0, tl.float32)
            numbers = tl.fma(x, factor + tl.zeros_like(x), shift) - shift
        else:
            numbers = x * factor
        numbers = tl.clamp(numbers, -LARGEST, LARGEST).to(number_ptr.dtype.element_ty)
        tl.store(number_ptr + token * size + column, numbers, mask=column < end)
    tl.store(scale_ptr + group * num_tokens + token, limit * (1.0 / LARGEST))


def _grouped_case(
    bits: int, tokens: int, group: int, *, minima: str | None = None, x: str = "*bf16",
    scales: str = "*bf16", is_unpacked: bool = False,
) -> AotCase:  # fmt: skip
    tile = grouped_tile(tokens, bits, 4 if x == "*fp32" else 2)
    types = {
        **{"x_ptr": x, "code_ptr": "*i32", "scale_ptr": scales, "minimum_ptr": f"*{minima}"},
        **dict.fromkeys(("factor_ptr", "minimum_factor_ptr"), "*bf16"),
        **{"bias_ptr": x, "out_ptr": x, "sum_ptr": "*fp32", "arrived_ptr": "*i32"},
        **{"num_tokens": "i32", "num_chunks": "i32"},
        **dict.fromkeys(("x_stride", "in_features", "out_features"), "i32:16"),
    }
    constants: dict[str, int | float | bool | str | None] = {
        **{"BITS": bits, "GROUP": group, "HAS_ASM": x != "*fp32", "BLOCK_N": tile.rows},
        **{"IS_EVEN": True, "BLOCK_M": tile.tokens, "bias_ptr": None},
    }
    if minima is None:
        constants["minimum_ptr"] = None
    if scales != "*i8":
        constants |= dict.fromkeys(("factor_ptr", "minimum_factor_ptr"))
    kernel, what = grouped_kernel, f"grouped_linear x {tile.tokens}"
    if is_unpacked:
        kernel, what = unpack_kernel, "unpack"
        constants["BLOCK_N"] = _UNPACK_ROWS
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    constants = {name: one for name, one in constants.items() if name in types}
    size = "all" if group == _ALL else group
    name = f"{what} {bits} bits, groups of {size}, {x[1:]}, scales {scales[1:]}"
    name += "" if minima is None else f", minima {minima}"
    if is_unpacked:
        return AotCase(name, kernel, types, constants)
    return AotCase(name, kernel, types, constants, tile.num_warps, tile.num_stages)


def _unpack_float8_case() -> AotCase:
    types = {
        **{"number_ptr": f"*{FP8}", "scale_ptr": "*fp32", "out_ptr": "*bf16"},
        **dict.fromkeys(("in_features", "out_features"), "i32:16"),
    }
    constants = {"GROUP": 128, "BLOCK_N": _UNPACK_ROWS, "BLOCK_K": ROUNDED_BLOCK}
    types |= dict.fromkeys(constants, "constexpr")
    return AotCase("unpack float8", unpack_float8_kernel, types, constants, capabilities=(89, 90))


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
    capabilities = (89, 90) if number == FP8 else (80, 90)
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
    capabilities = (89, 90) if number == FP8 else (80, 90)
    return AotCase(
        f"round_inputs {number}", round_kernel, types, constants, capabilities=capabilities
    )


_MANY_TOKENS = 2048
AOT_CASES = (
    *(_grouped_case(4, tokens, 128) for tokens in (1, 32, FEW_TOKENS)),
    _grouped_case(4, 1, 128, x="*fp16", scales="*fp16"),
    _grouped_case(4, 1, 128, minima="i8", scales="*fp16"),
    _grouped_case(4, 1, 32, scales="*fp16"),
    *(_grouped_case(4, tokens, 32, minima="i8", scales="*i8") for tokens in (1, FEW_TOKENS)),
    *(_grouped_case(8, tokens, _ALL) for tokens in (1, FEW_TOKENS)),
    _grouped_case(8, 1, 16, scales="*fp16"),
    _grouped_case(8, 1, _ALL, x="*fp16", scales="*fp16"),
    _grouped_case(4, 1, 128, is_unpacked=True),
    _grouped_case(4, 1, 32, minima="i8", scales="*i8", is_unpacked=True),
    _grouped_case(8, 1, _ALL, is_unpacked=True),
    _unpack_float8_case(),
    *(
        _rounded_case(number, rounded_tile(tokens), group, parts=tokens <= FEW_TOKENS)
        for number in ("i8", FP8)
        for group in (0, ROUNDED_BLOCK)
        for tokens in (1, FEW_TOKENS, _MANY_TOKENS)
        if number == FP8 or not group
    ),
    _round_case("i8"),
    _round_case(FP8),
)
