"""Gated units such as SwiGLU: ``activation(gate) * up`` of one fused projection.

Refuses to know: models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels import reference
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import (
    NUM_KEPT,
    Launcher,
    bind,
    dependent_options,
    row_stride,
    wait_for_kernel_before,
)

SWIGLU_LIMIT = tl.constexpr(reference.SWIGLU_LIMIT)
SWIGLU_ALPHA = tl.constexpr(reference.SWIGLU_ALPHA)
BLOCK = 1024  # columns per program: with 4 warps, a thread loads 16 bytes of bfloat16 at once


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `baton_kernels.reference.silu_mul` with Triton."""
    return gated_mul(gate_up, "silu")


def gated_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Compute `baton_kernels.reference.gated_mul` with Triton."""
    shape, launch = _bind(gate_up.shape, gate_up.stride(), gate_up.dtype, activation)
    if launch is None:  # rows are not contiguous
        return gated_mul(gate_up.contiguous(), activation)
    out = gate_up.new_empty(shape)
    launch(gate_up, out)
    return out


def gate_mul(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """Compute `baton_kernels.reference.gate_mul` with Triton."""
    num_rows, size = x.shape
    assert gate.shape == x.shape
    assert gate.stride(1) == x.stride(1) == 1
    out = x.new_empty((num_rows, size))
    if num_rows:
        launch = _gate_launcher(activation)
        launch((num_rows, -(-size // BLOCK)), (gate, x, out), (gate.stride(0), x.stride(0), size))
    return out


@functools.lru_cache(NUM_KEPT)
def _bind(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, activation: str
) -> tuple[tuple[int, ...], Callable[..., None] | None]:
    """Bind the launch to this shape; return the result's shape, and the launch.

    Returns None if rows are not contiguous.

    Args:
        dtype: dtype of the tensors; each dtype has a separate launch.
    """
    *rows, both = shape
    size, row = both // 2, row_stride(shape, stride)
    out_shape = (*rows, size)
    if row is None:
        return out_shape, None
    grid = (math.prod(rows), -(-size // BLOCK))
    return out_shape, bind(_launcher(activation), grid, (row, size))


@functools.cache
def _launcher(activation: str) -> Launcher:
    return Launcher(
        silu_mul_kernel, BLOCK=BLOCK, ACTIVATION=activation, num_warps=4, **dependent_options()
    )


@functools.cache
def _gate_launcher(activation: str) -> Launcher:
    return Launcher(gate_mul_kernel, BLOCK=BLOCK, ACTIVATION=activation, num_warps=4)


@triton.jit
def gate_of(x, ACTIVATION: tl.constexpr):
    """Apply the activation to ``x`` in float32."""
    if ACTIVATION == "clamped_swiglu":
        x = tl.where(x > SWIGLU_LIMIT, SWIGLU_LIMIT, x)
    if ACTIVATION == "gelu":
        gate = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        gate = tl.where(x > 0, x, 0.0)
    elif ACTIVATION == "sigmoid":
        small = tl.exp(-tl.abs(x))
        gate = tl.where(x >= 0, 1.0, small) / (1 + small)
    else:
        # silu(x) is x * sigmoid(x); gelu by tanh is x * sigmoid(2 * u).
        u = x
        if ACTIVATION == "gelu_tanh":
            u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        if ACTIVATION == "clamped_swiglu":
            u = SWIGLU_ALPHA * x
        # exp of a negative number cannot overflow
        small = tl.exp(-tl.abs(u))
        gate = x * tl.where(u >= 0, 1.0, small) / (1 + small)
    return gate


@triton.jit
def gated_half(x, ACTIVATION: tl.constexpr):
    """Return the factor of a gate, in float32, from the second half (ups) of a gated unit."""
    if ACTIVATION == "clamped_swiglu":
        x = tl.where(x > SWIGLU_LIMIT, SWIGLU_LIMIT, x)
        x = tl.where(x < -SWIGLU_LIMIT, -SWIGLU_LIMIT, x) + 1
    return x


@triton.jit
def silu_mul_kernel(
    gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply some columns of a row's two halves; round the activated gate first."""
    wait_for_kernel_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=exists, other=0.0)
    gate = gate_of(gate, ACTIVATION).to(dtype).to(tl.float32)
    up = gated_half(up.to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (gate * up).to(dtype), mask=exists)


@triton.jit
def gate_mul_kernel(
    gate_ptr, x_ptr, out_ptr, gate_stride, x_stride, size, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Multiply some columns of a row by their gates; round the activated gate first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    gate = gate_of(gate, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (gate * x).to(dtype), mask=exists)


def _case(activation: str, is_dependent: bool = False) -> AotCase:
    return AotCase(
        f"{activation}_mul bf16" + " dependent" * is_dependent,
        silu_mul_kernel,
        {
            "gate_up_ptr": "*bf16",
            "out_ptr": "*bf16",
            "stride": "i32:16",
            "size": "i32:16",
            "BLOCK": "constexpr",
            "ACTIVATION": "constexpr",
            "PDL": "constexpr",
        },
        {"BLOCK": BLOCK, "ACTIVATION": activation, "PDL": is_dependent},
        capabilities=(90,) if is_dependent else (80, 90),
    )


def _gate_case(activation: str) -> AotCase:
    return AotCase(
        f"gate_mul {activation} bf16",
        gate_mul_kernel,
        {
            "gate_ptr": "*bf16",
            "x_ptr": "*bf16",
            "out_ptr": "*bf16",
            "gate_stride": "i32:16",
            "x_stride": "i32:16",
            "size": "i32:16",
            "BLOCK": "constexpr",
            "ACTIVATION": "constexpr",
        },
        {"BLOCK": BLOCK, "ACTIVATION": activation},
    )


# Activations whose gates may be in a separate tensor; other gates are half of a joined tensor.
_ALONE = ("sigmoid", "relu")
AOT_CASES = (
    *(
        _gate_case(activation) if activation in _ALONE else _case(activation)
        for activation in reference.ACTIVATIONS
    ),
    _case("silu", is_dependent=True),
)
