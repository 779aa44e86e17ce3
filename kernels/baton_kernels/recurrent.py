"""The definitions of the ops of recurrent token mixers: convolutions and linear recurrences.

Instead of keys and values, a recurrent mixer keeps a state of fixed size per request. Each op reads
a request's earlier state, takes its tokens one by one, and writes the state after every segment, so
that later steps and requests can continue from there (`StateMetadata`)::

    request      A                       B
    segments     0       1       2       3
    tokens       x x x x x x x x x x x   x        a segment ends where a block of the cache ends
    slots        r     w       w     w   r w      r: read_slots, w: write_slots

Refuses to know: models, which request a slot belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels.state_metadata import StateMetadata

_LENGTH_EPS = 1e-6  # added under the root when the delta rule's keys and queries are normalized


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
    """Convolve each channel along its sequence, causally.

    Args:
        x: ``[num_tokens, num_channels]``, rows of any stride.
        weight: ``[num_channels, kernel_size]``; the last column is multiplied by the newest token.
        bias: ``[num_channels]``, or None.
        states: ``[num_slots, num_channels, kernel_size - 1]`` in the dtype of ``x``, any strides: a
            request's latest inputs, the newest last. Written after each segment.
        metadata: segments and state slots of the step.
        has_silu: whether to apply ``silu`` to the sums.
        in_gate: ``[num_tokens, num_channels]``, factors of ``x``; None: no gate.
        out_gate: ``[num_tokens, num_channels]``, factors of the result; None: no gate.

    Returns:
        ``[num_tokens, num_channels]`` in the dtype of ``x``, zeros after the last segment.
        Sums are in float32; each intermediate result is rounded.
    """
    gated = x if in_gate is None else in_gate * x  # [num_tokens, num_channels]
    num_kept = weight.shape[1] - 1
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for segments in _requests(metadata):
        window = _initial(states, segments[0].read_slot)  # [num_channels, kernel_size - 1]
        for segment in segments:
            inputs = torch.cat((window, gated[segment.tokens].T), dim=1)
            summed = x.new_zeros(1).float() if bias is None else bias.float().unsqueeze(1)
            for tap in range(num_kept + 1):
                # [num_channels, tokens]
                seen = inputs[:, tap : inputs.shape[1] - num_kept + tap].float()
                summed = summed + weight[:, tap : tap + 1].float() * seen
            rounded = summed.to(x.dtype)
            result = (functional.silu(rounded) if has_silu else rounded).T
            out[segment.tokens] = result if out_gate is None else out_gate[segment.tokens] * result
            window = inputs[:, inputs.shape[1] - num_kept :]
            if segment.write_slot >= 0:
                states[segment.write_slot] = window
    return out


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
    """Update and read states by Mamba 2's state space model (Dao and Gu, arXiv:2405.21060).

    A head's state ``S`` has ``state_dim`` rows and ``head_dim`` columns. For each token, with
    ``dt`` after bias and softplus::

        S = exp(-exp(a_log) * dt) * S + b (x) (dt * x)        result = c @ S + d * x

    Args:
        x: inputs, ``[num_tokens, num_heads, head_dim]``; tokens may have any stride, also in the
            arguments below.
        dt: time steps, ``[num_tokens, num_heads]``, before bias and softplus.
        b: factors by which inputs enter states, ``[num_tokens, num_groups, state_dim]``; adjacent
            heads share a group.
        c: factors by which states are read, ``[num_tokens, num_groups, state_dim]``.
        a_log: logarithms of the heads' decay rates, ``[num_heads]``.
        dt_bias: bias of the time steps, ``[num_heads]``.
        d: factors of the inputs in the result, ``[num_heads]``.
        states: ``[num_slots, num_heads, state_dim, head_dim]`` float32, gapless within a slot.
        metadata: segments and state slots of the step.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the dtype of ``x``, zeros after the last segment.
        Computed in float32.
    """
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (one.float().repeat_interleave(heads_per_group, dim=1) for one in (b, c))
    wide = x.float()
    dt = functional.softplus(dt.float() + dt_bias.float())  # [num_tokens, num_heads]
    decay = torch.exp(-a_log.float().exp() * dt)[..., None, None]
    written = dt.unsqueeze(-1) * wide  # [num_tokens, num_heads, head_dim]
    out = torch.zeros_like(wide)
    for segments in _requests(metadata):
        state = _initial(states, segments[0].read_slot)  # [num_heads, state_dim, head_dim]
        for segment in segments:
            for token in range(segment.tokens.start, segment.tokens.stop):
                state = state * decay[token] + b[token].unsqueeze(-1) * written[token].unsqueeze(1)
                out[token] = (c[token].unsqueeze(-1) * state).sum(1) + d.float()[:, None] * (
                    wide[token]
                )
            if segment.write_slot >= 0:
                states[segment.write_slot] = state
    return out.to(x.dtype)


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
    """Update and read states by the gated delta rule (Yang et al., arXiv:2412.06464).

    Keys and queries are normalized to length 1, and queries divided by ``sqrt(key_dim)``. For each
    token::

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + key (x) sigmoid(b) * (value - key @ S)        result = query @ S

    Args:
        query: queries, ``[num_tokens, num_key_heads, key_dim]``; tokens may have any stride, also
            in the arguments below.
        key: keys, ``[num_tokens, num_key_heads, key_dim]``.
        value: values, ``[num_tokens, num_heads, value_dim]``; adjacent heads share a key head.
        a: time steps before bias and softplus, ``[num_tokens, num_heads]``.
        b: strengths of the state's corrections before the sigmoid, ``[num_tokens, num_heads]``.
        a_log: logarithms of the heads' decay rates, ``[num_heads]``.
        dt_bias: bias of the time steps, ``[num_heads]``.
        states: ``[num_slots, num_heads, key_dim, value_dim]`` float32, gapless within a slot.
        metadata: segments and state slots of the step.

    Returns:
        ``[num_tokens, num_heads, value_dim]`` in the dtype of ``value``, zeros after the last
        segment. Computed in float32, but ``sigmoid(b)`` is rounded to the dtype of ``b``.
    """
    heads_per_key = value.shape[1] // key.shape[1]
    query, key = (
        _unit_length(one.float()).repeat_interleave(heads_per_key, dim=1) for one in (query, key)
    )
    query = query * query.shape[-1] ** -0.5  # [num_tokens, num_heads, key_dim]
    wide = value.float()
    decay = torch.exp(-a_log.float().exp() * functional.softplus(a.float() + dt_bias.float()))
    beta = b.sigmoid().float()  # [num_tokens, num_heads]
    out = torch.zeros_like(wide)
    for segments in _requests(metadata):
        state = _initial(states, segments[0].read_slot)  # [num_heads, key_dim, value_dim]
        for segment in segments:
            for token in range(segment.tokens.start, segment.tokens.stop):
                state = state * decay[token][:, None, None]
                known = (key[token].unsqueeze(-1) * state).sum(1)  # [num_heads, value_dim]
                correction = (wide[token] - known) * beta[token].unsqueeze(-1)
                state = state + key[token].unsqueeze(-1) * correction.unsqueeze(1)
                out[token] = (query[token].unsqueeze(-1) * state).sum(1)
            if segment.write_slot >= 0:
                states[segment.write_slot] = state
    return out.to(value.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool,
) -> Tensor:
    """Apply RMS norm to groups of each row; multiply by ``silu(gate)`` before or after the norm.

    Args:
        x: ``[num_tokens, size]``, rows of any stride.
        gate: ``[num_tokens, size]``, rows of any stride.
        weight: ``[size]``, or ``[group_size]`` for every group.
        eps: added to the mean square.
        group_size: number of elements that are normalized together; divides ``size``.
        norm_before_gate: whether the gate is multiplied after the norm, not before.

    Returns:
        ``[num_tokens, size]`` in the dtype of ``x``, to which results are rounded before and after
        the weight is applied.
    """
    wide = x.float().contiguous()  # [num_tokens, size]
    gated = functional.silu(gate.float())
    if not norm_before_gate:
        wide = wide * gated
    num_groups = x.shape[1] // group_size
    groups = wide.view(len(x), num_groups, group_size)  # [num_tokens, num_groups, group_size]
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = (weight.view(-1, group_size) * groups.to(x.dtype)).view(x.shape)
    return (normed * gated).to(x.dtype) if norm_before_gate else normed


class _Segment:
    """A segment: a run of tokens, and the slots of the states before and after the run."""

    def __init__(self, tokens: slice, read_slot: int, write_slot: int) -> None:
        self.tokens = tokens
        self.read_slot = read_slot
        self.write_slot = write_slot


def _requests(metadata: StateMetadata) -> Iterator[list[_Segment]]:
    """Yield, for each request with tokens in this step, its segments."""
    starts, borders = metadata.segment_start_loc.tolist(), metadata.request_start_loc.tolist()
    reads, writes = metadata.read_slots.tolist(), metadata.write_slots.tolist()
    for first, end in pairwise(borders):
        if first < end:
            yield [
                _Segment(slice(starts[one], starts[one + 1]), reads[one], writes[one])
                for one in range(first, end)
            ]


def _initial(states: Tensor, slot: int) -> Tensor:
    """Return a copy of the state in a slot; zeros for slot -1."""
    return torch.zeros_like(states[0]) if slot < 0 else states[slot].clone()


def _unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)
