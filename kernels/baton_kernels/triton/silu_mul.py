"""The unit of SwiGLU: ``silu(gate) * up`` of one joined projection. Refuses to know: models."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

BLOCK = 1024  # columns of a program: with 4 warps 16 bytes of bfloat16 per thread and load


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `baton_kernels.reference.silu_mul`."""
    size = gate_up.shape[-1] // 2
    rows, stride = gate_up, 2 * size
    if not gate_up.is_contiguous():
        rows = gate_up.reshape(-1, 2 * size)  # [num_rows, 2 * size]
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0)
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    num_rows = gate_up.numel() // (2 * size)
    if num_rows:
        _launcher()((num_rows, -(-size // BLOCK)), (rows, out), (stride, size))
    return out


@functools.cache
def _launcher() -> Launcher:
    return Launcher(silu_mul_kernel, BLOCK=BLOCK, num_warps=4)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr):
    """Some columns of one row; like the reference, silu is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=exists, other=0.0)
    # exp of minus the magnitude cannot overflow.
    small = tl.exp(-tl.abs(gate))
    silu = gate * tl.where(gate >= 0, 1.0, small) / (1 + small)
    gated = silu.to(dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, gated.to(dtype), mask=exists)


AOT_CASES = (
    AotCase(
        "silu_mul bf16",
        silu_mul_kernel,
        {
            "gate_up_ptr": "*bf16",
            "out_ptr": "*bf16",
            "stride": "i32:16",
            "size": "i32:16",
            "BLOCK": "constexpr",
        },
        {"BLOCK": BLOCK},
    ),
)
