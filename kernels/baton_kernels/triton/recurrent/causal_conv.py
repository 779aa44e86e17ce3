"""Short causal convolutions per channel, which read and write each request's state.

A program computes some channels of a request. If a request is long, several programs share its
tiles of tokens; only the first program reads and writes states. Refuses to know: models, which
request a slot belongs to.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.state_metadata import StateMetadata
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

CHANNELS = 128  # channels that a program computes
TILE_TOKENS = 8  # tokens of a tile, which a program computes at once
LARGEST_SHARE = 32  # maximum number of programs that share one request's tokens


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    *,
    has_silu: bool,
    in_gate: Tensor | None = None,
    out_gate: Tensor | None = None,
) -> Tensor:
    """Compute `baton_kernels.recurrent.causal_conv` with Triton."""
    num_tokens, num_channels = x.shape
    given = [one for one in (x, in_gate, out_gate) if one is not None]
    assert all(one.stride(1) == 1 for one in given), "x and gates: gapless rows"
    assert weight.is_contiguous()
    assert weight.dtype == states.dtype == x.dtype, f"states: {x.dtype}, got {states.dtype}"
    out = x.new_zeros(num_tokens, num_channels)
    num_requests = len(metadata.request_start_loc) - 1
    if num_requests:
        is_decode = num_tokens <= num_requests
        tile = 1 if is_decode else TILE_TOKENS
        share = 1 if is_decode else min(LARGEST_SHARE, -(-num_tokens // tile))
        _launcher(weight.shape[1], has_silu, tile)(
            (num_requests, -(-num_channels // CHANNELS), share),
            (
                *(x, weight, bias, in_gate, out_gate, states, out),
                *(metadata.segment_start_loc, metadata.read_slots, metadata.write_slots),
                metadata.request_start_loc,
            ),
            (
                x.stride(0),
                *(0 if gate is None else gate.stride(0) for gate in (in_gate, out_gate)),
                *states.stride(),
                num_channels,
            ),
        )
    return out


@functools.cache
def _launcher(kernel_size: int, has_silu: bool, tile: int) -> Launcher:
    return Launcher(
        causal_conv_kernel,
        KERNEL=kernel_size,
        KEPT=triton.next_power_of_2(max(kernel_size - 1, 1)),
        SILU=has_silu,
        TOKENS=tile,
        CHANNELS=CHANNELS,
        num_warps=4,
    )


@triton.jit
def load_inputs(
    x_ptr, in_gate_ptr, x_stride, in_gate_stride, token, channel, mask, dtype: tl.constexpr
):  # fmt: skip
    """Load inputs, times their gate if any: float32 ``[tokens, CHANNELS]``; 0 where masked."""
    inputs = tl.load(x_ptr + token[:, None] * x_stride + channel[None, :], mask=mask, other=0.0)
    inputs = inputs.to(tl.float32)
    if in_gate_ptr is not None:
        place = in_gate_ptr + token[:, None] * in_gate_stride + channel[None, :]
        gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        inputs = (inputs * gate).to(dtype).to(tl.float32)
    return inputs


@triton.jit
def causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, in_gate_ptr, out_gate_ptr, states_ptr, out_ptr,
    segment_start_ptr, read_ptr, write_ptr, request_start_ptr,
    x_stride, in_gate_stride, out_gate_stride, slot_stride, channel_stride, tap_stride,
    num_channels,
    KERNEL: tl.constexpr, KEPT: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one request; the request's programs take its tiles in turn."""
    dtype = out_ptr.dtype.element_ty
    first_segment = tl.load(request_start_ptr + tl.program_id(0))
    end_segment = tl.load(request_start_ptr + tl.program_id(0) + 1)
    begin = tl.load(segment_start_ptr + first_segment)
    end = tl.load(segment_start_ptr + end_segment)
    slot = tl.load(read_ptr + first_segment, mask=first_segment < end_segment, other=-1)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_row = channel < num_channels
    # [1, CHANNELS]: address of the request's state before this step
    before_ptr = (states_ptr + slot.to(tl.int64) * slot_stride + channel * channel_stride)[None, :]
    kept = tl.arange(0, KEPT)
    is_kept = (kept < KERNEL - 1)[:, None] & in_row[None, :]
    initial = tl.load(
        before_ptr + (kept * tap_stride)[:, None], mask=is_kept & (slot >= 0), other=0.0
    ).to(tl.float32)  # [KEPT, CHANNELS]
    step = TOKENS * tl.num_programs(2)
    for tile in range(begin + tl.program_id(2) * TOKENS, end, step):
        token = (tile + tl.arange(0, TOKENS)).to(tl.int64)
        exists = (token < end)[:, None] & in_row[None, :]
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=in_row, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(KERNEL):
            at = token - (KERNEL - 1) + tap
            is_new = (at >= begin)[:, None] & exists
            seen = load_inputs(
                x_ptr, in_gate_ptr, x_stride, in_gate_stride, at, channel, is_new, dtype
            )
            place = before_ptr + ((at - begin + KERNEL - 1) * tap_stride)[:, None]
            is_old = (at < begin)[:, None] & exists & (slot >= 0)
            seen += tl.load(place, mask=is_old, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + channel * KERNEL + tap, mask=in_row, other=0.0)
            total += seen * weight.to(tl.float32)[None, :]
        store_results(out_ptr, out_gate_ptr, out_gate_stride, token, channel, num_channels,
                      total.to(dtype).to(tl.float32), exists, SILU)  # fmt: skip
    if tl.program_id(2) == 0:
        tl.debug_barrier()  # wait until all threads have read the slot, which is written next
        for segment in range(first_segment, end_segment):
            at = (tl.load(segment_start_ptr + segment + 1) - (KERNEL - 1) + kept).to(tl.int64)
            is_new = (at >= begin)[:, None] & is_kept
            newest = load_inputs(
                x_ptr, in_gate_ptr, x_stride, in_gate_stride, at, channel, is_new, dtype
            )
            # With fewer new tokens than the state holds, a part of the earlier state is kept.
            same = (at - begin + KERNEL - 1)[:, None] == kept[None, :]  # [KEPT, KEPT]
            newest += tl.sum(tl.where(same[:, :, None], initial[None, :, :], 0.0), axis=1)
            write = tl.load(write_ptr + segment)
            place = states_ptr + write.to(tl.int64) * slot_stride + channel * channel_stride
            place = place[None, :] + (kept * tap_stride)[:, None]
            tl.store(place, newest.to(dtype), mask=is_kept & (write >= 0))


@triton.jit
def store_results(
    out_ptr, out_gate_ptr, out_gate_stride, token, channel, num_channels, result, mask,
    SILU: tl.constexpr,
):  # fmt: skip
    """Store ``result``, float32 ``[tokens, CHANNELS]``, after ``silu`` and the gate.

    ``silu`` is applied if ``SILU`` is set, and the gate if ``out_gate_ptr`` is not None.
    """
    dtype = out_ptr.dtype.element_ty
    if SILU:
        small = tl.exp(-tl.abs(result))  # exp(-|x|) cannot overflow
        result = result * tl.where(result >= 0, 1.0, small) / (1 + small)
        result = result.to(dtype).to(tl.float32)
    if out_gate_ptr is not None:
        place = out_gate_ptr + token[:, None] * out_gate_stride + channel[None, :]
        result *= tl.load(place, mask=mask, other=0.0).to(tl.float32)
    place = out_ptr + token[:, None] * num_channels + channel[None, :]
    tl.store(place, result.to(dtype), mask=mask)


def _case(name: str, kernel_size: int, gated: bool, tile: int) -> AotCase:
    pointers = ("x_ptr", "weight_ptr", "states_ptr", "out_ptr")
    slots = ("segment_start_ptr", "read_ptr", "write_ptr", "request_start_ptr")
    gates, bias = ("in_gate_ptr", "out_gate_ptr"), ("bias_ptr",)
    given, absent = (gates, bias) if gated else (bias, gates)
    strides = ("x_stride", "in_gate_stride", "out_gate_stride", "slot_stride", "num_channels")
    constants = {
        "KERNEL": kernel_size,
        "KEPT": triton.next_power_of_2(kernel_size - 1),
        "SILU": not gated,
        "TOKENS": tile,
        "CHANNELS": CHANNELS,
    }
    return AotCase(
        f"causal_conv {name} bf16",
        causal_conv_kernel,
        {
            **dict.fromkeys((*pointers, *given), "*bf16"),
            **dict.fromkeys(slots, "*i32"),
            **dict.fromkeys(strides, "i32:16"),
            **dict.fromkeys(("channel_stride", "tap_stride"), "i32"),
            **dict.fromkeys((*absent, *constants), "constexpr"),
        },
        {**dict.fromkeys(absent), **constants},
    )


AOT_CASES = (
    _case("silu k4 decode", 4, False, 1),
    _case("silu k4 prompt", 4, False, TILE_TOKENS),
    _case("gated k3 decode", 3, True, 1),
    _case("gated k3 prompt", 3, True, TILE_TOKENS),
)
