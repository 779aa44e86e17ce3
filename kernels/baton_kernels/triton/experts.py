"""A mixture of experts: rows are sorted by expert, and multiplied in tiles of one expert each.

The number of tiles (`RowTiles`) does not depend on the routing, and tiles without an expert return
at once, so a CUDA graph can hold all launches.
Refuses to know: models, how experts are chosen.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.reference import count_loads
from baton_kernels.routing import ALL_EXPERTS, ExpertShare
from baton_kernels.row_tiles import RowTiles
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher
from baton_kernels.triton.silu_mul import gate_of, gated_half

BLOCK_K = 64
FEW_ROWS = 16  # fewest rows of a tile that tl.dot supports
MANY_ROWS = 64
SUM_BLOCK = 1024


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    base: Tensor | None = None,
    base_gate: Tensor | None = None,
    *,
    biases: tuple[Tensor, Tensor] | None = None,
    activation: str = "silu",
    invariant: bool = False,
    share: ExpertShare = ALL_EXPERTS,
    loads: Tensor | None = None,
) -> Tensor:
    """Compute `baton_kernels.reference.experts` with Triton."""
    num_tokens, hidden = x.shape
    num_experts, inner = len(gate_up), down.shape[2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    num_rows, top_k = ids.numel(), ids.shape[1]
    # With `invariant`, all batches use one tile size, because others may add in another order.
    is_many = invariant or num_rows >= MANY_ROWS // 2 * num_experts
    tile_rows = MANY_ROWS if is_many else FEW_ROWS
    if loads is not None:
        count_loads(ids, share, loads)
    tiles = RowTiles.of(_own_numbers(ids, share, num_experts), num_experts, tile_rows)
    x, gate_up, down = x.contiguous(), gate_up.contiguous(), down.contiguous()
    gate_up_bias, down_bias = biases or (None, None)
    middle = x.new_empty(num_rows, inner)
    _gate_up_launcher(tile_rows, activation)(
        (tiles.count, triton.cdiv(inner, 64)),
        (
            x,
            gate_up,
            gate_up_bias,
            middle,
            *tiles.tensors,
        ),
        (num_experts, hidden, inner, top_k),
    )
    # other ranks' rows must be 0
    results = x.new_zeros(num_rows, hidden) if share.size > 1 else x.new_empty(num_rows, hidden)
    _down_launcher(tile_rows)(
        (tiles.count, triton.cdiv(hidden, 64)),
        (
            middle,
            down,
            down_bias,
            results,
            *tiles.tensors,
        ),
        (num_experts, inner, hidden),
    )
    base = None if base is None else base.contiguous()
    _sum_launcher()(
        (num_tokens, triton.cdiv(hidden, SUM_BLOCK)),
        (results, weights.contiguous(), base, base_gate, out),
        (hidden, top_k),
    )
    return out


def _own_numbers(ids: Tensor, share: ExpertShare, num_experts: int) -> Tensor:
    """Return each row's number among this rank's experts; ``num_experts``: another rank's."""
    if share.size == 1:
        return ids
    return (ids // share.size).masked_fill(ids % share.size != share.rank, num_experts)


@functools.cache
def _gate_up_launcher(tile_rows: int, activation: str) -> Launcher:
    return Launcher(gate_up_kernel, **_options(tile_rows), ACTIVATION=activation)


@functools.cache
def _down_launcher(tile_rows: int) -> Launcher:
    return Launcher(down_kernel, **_options(tile_rows))


@functools.cache
def _sum_launcher() -> Launcher:
    return Launcher(sum_kernel, BLOCK=SUM_BLOCK, num_warps=4)


def _options(tile_rows: int) -> dict[str, int | float | bool | None]:
    return {
        "BLOCK_M": tile_rows,
        "BLOCK_N": 64,
        "BLOCK_K": BLOCK_K,
        "num_warps": 4,
        "num_stages": 3,
    }


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    middle_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    order_ptr,
    num_experts,
    hidden,
    inner,
    top_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Compute BLOCK_N columns of the gated result of an expert's first layer, for one tile.

    Rounds as the reference does.
    """
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= num_experts:
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(end_ptr + expert)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < inner
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row // top_k)[:, None] * hidden + depth[None, :]
    # Without gates, the first layer has only up projections.
    HALVES: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    gate_at = weight_ptr + (expert * HALVES * inner + column)[None, :] * hidden + depth[:, None]
    up_at = gate_at + inner.to(tl.int64) * hidden
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        exists = depth < hidden - start
        x = tl.load(x_at + start, mask=is_row[:, None] & exists[None, :], other=0.0)
        is_weight = exists[:, None] & is_column[None, :]
        gate_weight = tl.load(gate_at + start, mask=is_weight, other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        if HALVES == 2:
            up_weight = tl.load(up_at + start, mask=is_weight, other=0.0)
            up = tl.dot(x, up_weight, up, input_precision="ieee")
    dtype = middle_ptr.dtype.element_ty
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * HALVES * inner + column
        gate += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if HALVES == 2:
            up += tl.load(bias_at + inner, mask=is_column, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(dtype).to(tl.float32)
    if HALVES == 2:
        gate = gate_of(gate, ACTIVATION).to(dtype).to(tl.float32)
        up = gated_half(up.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        gated = gate * up
    else:
        gate = gate_of(gate, "relu")
        gated = gate * gate
    middle_at = middle_ptr + row[:, None] * inner + column[None, :]
    tl.store(middle_at, gated.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_kernel(
    middle_ptr,
    weight_ptr,
    bias_ptr,
    result_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    order_ptr,
    num_experts,
    inner,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of an expert's second layer, for one tile."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert >= num_experts:
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row = place < tl.load(end_ptr + expert)
    row = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < hidden
    depth = tl.arange(0, BLOCK_K)
    middle_at = middle_ptr + row[:, None] * inner + depth[None, :]
    weight_at = weight_ptr + (expert * hidden + column)[None, :] * inner + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        exists = depth < inner - start
        middle = tl.load(middle_at + start, mask=is_row[:, None] & exists[None, :], other=0.0)
        is_weight = exists[:, None] & is_column[None, :]
        weight = tl.load(weight_at + start, mask=is_weight, other=0.0)
        total = tl.dot(middle, weight, total, input_precision="ieee")
    result_at = result_ptr + row[:, None] * hidden + column[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * hidden + column, mask=is_column, other=0.0)
        total += bias.to(tl.float32)[None, :]
    total = total.to(result_ptr.dtype.element_ty)
    tl.store(result_at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def sum_kernel(
    result_ptr, weight_ptr, base_ptr, base_gate_ptr, out_ptr, hidden, top_k, BLOCK: tl.constexpr
):
    """Sum the weighted results of a token's experts, in order, for some columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(top_k):
        row = token * top_k + place
        result = tl.load(result_ptr + row * hidden + column, mask=exists, other=0.0)
        total += tl.load(weight_ptr + row) * result.to(tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + token * hidden + column, mask=exists, other=0.0).to(tl.float32)
        if base_gate_ptr is not None:
            gate = tl.load(base_gate_ptr + token).to(tl.float32)
            base = base / (1 + tl.exp(-gate))
        total += base
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=exists)


_TILES = dict.fromkeys(("expert_ptr", "first_ptr", "end_ptr", "order_ptr"), "*i64")


def _product_cases(
    tile_rows: int, activation: str = "silu", *, biases: bool = False
) -> list[AotCase]:
    constants: dict[str, int | str | None]
    constants = {"BLOCK_M": tile_rows, "BLOCK_N": 64, "BLOCK_K": BLOCK_K}
    if not biases:
        constants["bias_ptr"] = None
    rows = ("x_ptr", "weight_ptr", "bias_ptr", "middle_ptr", "result_ptr")
    types = dict.fromkeys(rows, "*bf16") | _TILES | {"top_k": "i32", "ACTIVATION": "constexpr"}
    types |= dict.fromkeys(("num_experts", "hidden", "inner"), "i32:16")
    types |= dict.fromkeys(constants, "constexpr")
    name = f"m{tile_rows} bf16" + f" {activation}" * (activation != "silu") + ", biases" * biases
    gated = constants | {"ACTIVATION": activation}
    return [
        AotCase(f"experts gate_up {name}", gate_up_kernel, types, gated, 4, 3),
        AotCase(f"experts down {name}", down_kernel, types, constants, 4, 3),
    ]


AOT_CASES = (
    *_product_cases(FEW_ROWS),
    *_product_cases(MANY_ROWS),
    *_product_cases(FEW_ROWS, "relu2")[:1],
    *_product_cases(MANY_ROWS, "relu2")[:1],
    *_product_cases(FEW_ROWS, "clamped_swiglu", biases=True),
    *_product_cases(MANY_ROWS, "clamped_swiglu", biases=True),
    AotCase(
        "experts sum bf16",
        sum_kernel,
        {
            "result_ptr": "*bf16",
            "weight_ptr": "*fp32",
            "base_ptr": "*bf16",
            "base_gate_ptr": "*fp32",
            "out_ptr": "*bf16",
            "hidden": "i32:16",
            "top_k": "i32",
            "BLOCK": "constexpr",
        },
        {"BLOCK": SUM_BLOCK},
    ),
)
