"""The ops that a model may call; ``baton_kernels.dispatch`` chooses what computes them.

The function of the same name in ``baton_kernels.reference`` defines each op, its arguments and its
result. Refuses to know: models, requests, where a tensor came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.dispatch import ops_for
from baton_kernels.low_rank import LowRank, LowRankPart, LowRankSlots, LowRankSpan
from baton_kernels.packed import (
    E2M1_TWICE,
    CodeLayout,
    Float8Rows,
    GroupedIntegers,
    Groups,
    PackedWeight,
    WeightFormat,
)
from baton_kernels.quantized import GroupedWeight, QuantizedWeight, RoundedWeight
from baton_kernels.reference import FP8, gather_kv, paged_attention, rotary, store_kv
from baton_kernels.routing import Routing, Scoring
from baton_kernels.row_tiles import RowTiles
from baton_kernels.state_metadata import StateMetadata


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return ops_for(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(sum), sum)``, where ``sum`` is ``residual + x * factor``."""
    return ops_for(x).add_rms_norm(x, residual, weight, eps, factor)


def scaled_add(x: Tensor, residual: Tensor, factor: float = 1.0) -> Tensor:
    """``residual + x * factor``."""
    return ops_for(x).scaled_add(x, residual, factor)


def join(x: Tensor, y: Tensor) -> Tensor:
    """Concatenate each row of ``x`` with the same row of ``y``."""
    return ops_for(x).join(x, y)


def largest(x: Tensor) -> Tensor:
    """Return the index of each row's largest number; the first one if several are equal."""
    return ops_for(x).largest(x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension."""
    return ops_for(gate_up).silu_mul(gate_up)


def gated_mul(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` of the two halves of the last dimension."""
    return ops_for(gate_up).gated_mul(gate_up, activation)


def gate_mul(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """``activation(gate) * x``."""
    return ops_for(x).gate_mul(gate, x, activation)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``."""
    return ops_for(x).soft_cap(x, cap)


def norm_rotary_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Norm heads, rotate, and store keys and values; return the rotated query."""
    return ops_for(qkv).norm_rotary_store(
        *(qkv, num_heads, cos, sin, kv_cache, slot_mapping),
        query_weight=query_weight,
        key_weight=key_weight,
        eps=eps,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int,
    norm_before_gate: bool,
) -> Tensor:
    """Root-mean-square norm of groups, times ``silu(gate)``."""
    return ops_for(x).gated_rms_norm(
        x, gate, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate
    )


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
    """Convolve each channel over its newest inputs."""
    return ops_for(x).causal_conv(
        *(x, weight, bias, states, metadata),
        has_silu=has_silu,
        in_gate=in_gate,
        out_gate=out_gate,
    )


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
    """Scan by Mamba 2's state space."""
    return ops_for(x).selective_scan(x, dt, b, c, a_log, dt_bias, d, states, metadata)


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
    """Run Gated DeltaNet's recurrence."""
    return ops_for(value).gated_delta_rule(
        query, key, value, a, b, a_log, dt_bias, states, metadata
    )


def norm_rotary_store_latent(
    query: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    eps: float,
    interleaved: bool,
    out: Tensor,
) -> None:
    """Norm and store latents, and rotate the dims that carry the position; write to ``out``."""
    ops_for(query).norm_rotary_store_latent(
        *(query, latent, cos, sin, cache, slot_mapping),
        weight=weight,
        eps=eps,
        interleaved=interleaved,
        out=out,
    )


def grouped_packed_linear(x: Tensor, weight: PackedWeight, out: Tensor) -> None:
    """Multiply each group of inputs by its own block of a packed, block-diagonal weight."""
    ops_for(x).grouped_packed_linear(x, weight, out)


def pack_rows(weight: PackedWeight, first_row: int, rows: Tensor) -> None:
    """Write rows of a linear layer's weight into its panels."""
    ops_for(rows).pack_rows(weight, first_row, rows)


def pack_float8(weight: PackedWeight, first_row: int, rows: Float8Rows) -> None:
    """Write rows that a checkpoint keeps in float8 into a weight's panels."""
    ops_for(rows.numbers).pack_float8(weight, first_row, rows)


def pack_integers(weight: PackedWeight, first_row: int, integers: GroupedIntegers) -> None:
    """Write rows that a checkpoint keeps as integers into a weight's panels."""
    ops_for(integers.numbers).pack_integers(weight, first_row, integers)


def unpack_rows(weight: PackedWeight, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Read rows of a weight that is kept in float32 or bfloat16."""
    return ops_for(ids).unpack_rows(weight, ids, dtype)


def packed_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ weight.T + bias`` with a packed weight, which is always on the CPU."""
    return ops_for(x).packed_linear(x, weight)


def packed_gated_linear(x: Tensor, weight: PackedWeight, activation: str = "silu") -> Tensor:
    """``gated_mul(packed_linear(x, weight), activation)``."""
    return ops_for(x).packed_gated_linear(x, weight, activation)


def packed_scores(x: Tensor, weight: PackedWeight) -> Tensor:
    """``packed_linear`` in float32, whatever ``x`` is."""
    return ops_for(x).packed_scores(x, weight)


def add_low_rank(out: Tensor, x: Tensor, spans: Sequence[LowRankSpan]) -> None:
    """Add adapters' products to rows of a layer's output, in place."""
    ops_for(x).add_low_rank(out, x, spans)


def add_low_rank_by_slot(
    out: Tensor, x: Tensor, slots: LowRankSlots, ids: Tensor, tiles: RowTiles
) -> None:
    """Add each row's adapter's product to a layer's output, in place; shapes are static."""
    ops_for(x).add_low_rank_by_slot(out, x, slots, ids, tiles)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with a weight of 4 or 8 bits per number, laid out for GPUs."""
    return ops_for(x).quantized_linear(x, weight, bias)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """``x @ weight.T + bias``; a token's result does not depend on the batch, even on a GPU."""
    return ops_for(x).invariant_linear(x, weight, bias, arrived)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their weights."""
    return ops_for(logits).route(logits, routing, bias)


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
) -> Tensor:
    """Send each token through its experts, and add up the weighted results.

    With ``invariant``, a token's result does not depend on the batch, even on a GPU.
    """
    return ops_for(x).experts(
        *(x, ids, weights, gate_up, down, base, base_gate),
        biases=biases, activation=activation, invariant=invariant,
    )  # fmt: skip


def packed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    base: Tensor | None = None,
    base_gate: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """`experts` with packed weights, which are always on the CPU."""
    return ops_for(x).packed_experts(
        x, ids, weights, gate_up, down, base, base_gate, activation=activation
    )


__all__ = [
    "E2M1_TWICE",
    "FP8",
    "CodeLayout",
    "Float8Rows",
    "GroupedIntegers",
    "GroupedWeight",
    "Groups",
    "LowRank",
    "LowRankPart",
    "LowRankSlots",
    "LowRankSpan",
    "PackedWeight",
    "QuantizedWeight",
    "RoundedWeight",
    "Routing",
    "RowTiles",
    "Scoring",
    "StateMetadata",
    "WeightFormat",
    "add_low_rank",
    "add_low_rank_by_slot",
    "add_rms_norm",
    "causal_conv",
    "experts",
    "gate_mul",
    "gated_delta_rule",
    "gated_mul",
    "gated_rms_norm",
    "gather_kv",
    "grouped_packed_linear",
    "invariant_linear",
    "join",
    "largest",
    "norm_rotary_store",
    "norm_rotary_store_latent",
    "pack_float8",
    "pack_integers",
    "pack_rows",
    "packed_experts",
    "packed_gated_linear",
    "packed_linear",
    "packed_scores",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "route",
    "scaled_add",
    "selective_scan",
    "silu_mul",
    "soft_cap",
    "store_kv",
    "unpack_rows",
]
