"""Linear recurrences, token by token: Mamba 2's state space and the gated delta rule.

A program keeps some columns of one head's state in registers while it computes a request's tokens.
Different columns of a state do not depend on each other. Refuses to know: models, which request a
slot belongs to.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.state_metadata import StateMetadata
from baton_kernels.triton.aot import AotCase
from baton_kernels.triton.launch import Launcher

STATE_ELEMENTS = 4096  # state elements per program: 32 registers for each of 128 threads
LARGEST_KEY_DIM = 512


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Compute `baton_kernels.recurrent.selective_scan` with Triton."""
    return _recurrence(c, b, x, dt, None, a_log, dt_bias, d, states, metadata)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Compute `baton_kernels.recurrent.gated_delta_rule` with Triton."""
    return _recurrence(query, key, value, a, b, a_log, dt_bias, None, states, metadata)


def _recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: Tensor,
    beta: Tensor | None,
    log_decay: Tensor,
    rate_bias: Tensor,
    skip: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Compute the gated delta rule, or the selective scan if ``beta`` is None."""
    num_tokens, num_heads, value_dim = value.shape
    num_key_heads, key_dim = key.shape[1:]
    by_token = [one for one in (query, key, value, rate, beta) if one is not None]
    assert all(one[:1].is_contiguous() for one in by_token), "inputs: gapless tokens"
    assert states.dtype == torch.float32, f"states: float32, got {states.dtype}"
    assert states[:1].is_contiguous(), "states: gapless within a slot"
    assert num_heads % num_key_heads == 0
    assert key_dim <= LARGEST_KEY_DIM, f"key_dim: at most {LARGEST_KEY_DIM}, got {key_dim}"
    out = value.new_zeros(num_tokens, num_heads, value_dim)
    num_requests = len(metadata.request_start_loc) - 1
    if num_requests:
        columns, launch = _launcher(key_dim, value_dim, beta is not None)
        launch(
            (-(-value_dim // columns), num_heads, num_requests),
            (
                *(query, key, value, rate, beta, log_decay, rate_bias, skip, states, out),
                *(metadata.segment_start_loc, metadata.read_slots, metadata.write_slots),
                metadata.request_start_loc,
            ),
            (
                *(query.stride(0), key.stride(0), value.stride(0), rate.stride(0)),
                *(0 if beta is None else beta.stride(0), states.stride(0)),
                *(num_heads, num_heads // num_key_heads, key_dim, value_dim, key_dim**-0.5),
            ),
        )
    return out


@functools.cache
def _launcher(key_dim: int, value_dim: int, is_delta: bool) -> tuple[int, Launcher]:
    """Return the number of a state's columns that a program computes, and the launcher."""
    rows, columns = _tile(key_dim, value_dim)
    return columns, Launcher(
        recurrence_kernel, DELTA=is_delta, ROWS=rows, COLUMNS=columns, num_warps=4
    )


def _tile(key_dim: int, value_dim: int) -> tuple[int, int]:
    rows = triton.next_power_of_2(key_dim)
    return rows, min(triton.next_power_of_2(value_dim), max(STATE_ELEMENTS // rows, 1))


@triton.jit
def recurrence_kernel(
    query_ptr, key_ptr, value_ptr, rate_ptr, beta_ptr, log_decay_ptr, rate_bias_ptr, skip_ptr,
    states_ptr, out_ptr, segment_start_ptr, read_ptr, write_ptr, request_start_ptr,
    query_stride, key_stride, value_stride, rate_stride, beta_stride, slot_stride,
    num_heads, heads_per_key, key_dim, value_dim, query_scale,
    DELTA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one head for all tokens of a request."""
    dtype = out_ptr.dtype.element_ty
    head = tl.program_id(1)
    first_segment = tl.load(request_start_ptr + tl.program_id(2))
    end_segment = tl.load(request_start_ptr + tl.program_id(2) + 1)
    slot = tl.load(read_ptr + first_segment, mask=first_segment < end_segment, other=-1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = row < key_dim, column < value_dim
    within = in_key[:, None] & in_value[None, :]
    # [ROWS, COLUMNS]: offsets of a head's state within a slot
    place = head * key_dim * value_dim + row[:, None] * value_dim + column[None, :]
    state = tl.load(
        states_ptr + slot.to(tl.int64) * slot_stride + place, mask=within & (slot >= 0), other=0.0
    )
    key_at = head // heads_per_key * key_dim + row
    value_at = head * value_dim + column
    rate_bias = tl.load(rate_bias_ptr + head).to(tl.float32)
    decay_rate = -tl.exp(tl.load(log_decay_ptr + head).to(tl.float32))
    for segment in range(first_segment, end_segment):
        begin = tl.load(segment_start_ptr + segment).to(tl.int64)
        end = tl.load(segment_start_ptr + segment + 1).to(tl.int64)
        for token in range(begin, end):
            query = tl.load(query_ptr + token * query_stride + key_at, mask=in_key, other=0.0)
            key = tl.load(key_ptr + token * key_stride + key_at, mask=in_key, other=0.0)
            value = tl.load(value_ptr + token * value_stride + value_at, mask=in_value, other=0.0)
            query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
            rate = tl.load(rate_ptr + token * rate_stride + head).to(tl.float32) + rate_bias
            # softplus(z) is log(1 + x) with x = exp(z); if 1 + x rounds to 1, x itself is closer.
            grown = tl.exp(tl.minimum(rate, 20.0))
            more = 1 + grown
            log = tl.where(more == 1, grown, tl.log(more) * grown / (more - 1 + (more == 1)))
            rate = tl.where(rate > 20, rate, log)
            state *= tl.exp(decay_rate * rate)
            if DELTA:
                beta = tl.load(beta_ptr + token * beta_stride + head).to(tl.float32)
                small = tl.exp(-tl.abs(beta))
                beta = (tl.where(beta >= 0, 1.0, small) / (1 + small)).to(dtype).to(tl.float32)
                query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * query_scale
                key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
                known = tl.sum(state * key[:, None], axis=0)
                written = (value - known) * beta
            else:
                written = value * rate
            state += key[:, None] * written[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            if not DELTA:
                result += tl.load(skip_ptr + head).to(tl.float32) * value
            to = out_ptr + token * num_heads * value_dim + value_at
            tl.store(to, result.to(dtype), mask=in_value)
        write = tl.load(write_ptr + segment)
        to = states_ptr + write.to(tl.int64) * slot_stride + place
        tl.store(to, state, mask=within & (write >= 0))


def _case(name: str, key_dim: int, value_dim: int, is_delta: bool) -> AotCase:
    rows, columns = _tile(key_dim, value_dim)
    absent = "skip_ptr" if is_delta else "beta_ptr"
    pointers = (
        "query_ptr", "key_ptr", "value_ptr", "rate_ptr", "beta_ptr", "log_decay_ptr",
        "rate_bias_ptr", "skip_ptr", "out_ptr",
    )  # fmt: skip
    slots = ("segment_start_ptr", "read_ptr", "write_ptr", "request_start_ptr")
    strides = ("query_stride", "key_stride", "value_stride", "slot_stride", "key_dim", "value_dim")
    others = ("rate_stride", "beta_stride", "num_heads", "heads_per_key")
    constants = {"DELTA": is_delta, "ROWS": rows, "COLUMNS": columns}
    return AotCase(
        f"{name} bf16",
        recurrence_kernel,
        {
            **dict.fromkeys(pointers, "*bf16"),
            "states_ptr": "*fp32",
            **dict.fromkeys(slots, "*i32"),
            **dict.fromkeys(strides, "i32:16"),
            **dict.fromkeys(others, "i32"),
            "query_scale": "fp32",
            **dict.fromkeys((absent, *constants), "constexpr"),
        },
        {absent: None, **constants},
    )


AOT_CASES = (
    _case("gated_delta_rule k128 v128", 128, 128, True),
    _case("selective_scan n128 d64", 128, 64, False),
    _case("selective_scan n256 d64", 256, 64, False),
)
