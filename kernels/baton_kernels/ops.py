"""Ops: the signatures of all ops, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton_kernels.low_rank import LowRankSlots, LowRankSpan
from baton_kernels.packed import Float8Rows, GroupedIntegers, PackedWeight
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.routing import ALL_EXPERTS, ExpertShare, Routing
from baton_kernels.row_tiles import RowTiles
from baton_kernels.state_metadata import StateMetadata


class Ops(Protocol):
    """The interface of an implementation of all ops, which ``baton_kernels.reference`` defines."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]: ...

    def scaled_add(
        self, x: Tensor, residual: Tensor, factor: float = 1.0, sum_factor: float = 1.0
    ) -> Tensor: ...

    def join(self, x: Tensor, y: Tensor) -> Tensor: ...

    def largest(self, x: Tensor) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gated_mul(self, gate_up: Tensor, activation: str) -> Tensor: ...

    def gate_mul(self, gate: Tensor, x: Tensor, activation: str) -> Tensor: ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...

    def attend_runs(
        self, query: Tensor, keys_values: Tensor, runs: Sequence[tuple[int, int]]
    ) -> Tensor: ...

    def norm_rotary_store(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor | None,
        *,
        query_weight: Tensor | None = None,
        key_weight: Tensor | None = None,
        value_weight: Tensor | None = None,
        eps: float = 0.0,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor: ...

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        group_size: int,
        norm_before_gate: bool,
    ) -> Tensor: ...

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        metadata: StateMetadata,
        *,
        has_silu: bool,
        in_gate: Tensor | None = None,
        out_gate: Tensor | None = None,
    ) -> Tensor: ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor: ...

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor: ...

    def norm_rotary_store_latent(
        self,
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
    ) -> None: ...

    def grouped_packed_linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None: ...

    def pack_rows(self, weight: PackedWeight, first_row: int, rows: Tensor) -> None: ...

    def pack_float8(self, weight: PackedWeight, first_row: int, rows: Float8Rows) -> None: ...

    def pack_integers(
        self, weight: PackedWeight, first_row: int, integers: GroupedIntegers
    ) -> None: ...

    def unpack_rows(
        self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor: ...

    def packed_linear(self, x: Tensor, weight: PackedWeight) -> Tensor: ...

    def packed_gated_linear(
        self, x: Tensor, weight: PackedWeight, activation: str = "silu"
    ) -> Tensor: ...

    def add_low_rank(self, out: Tensor, x: Tensor, spans: Sequence[LowRankSpan]) -> None: ...

    def add_low_rank_by_slot(
        self, out: Tensor, x: Tensor, slots: LowRankSlots, ids: Tensor, tiles: RowTiles
    ) -> None: ...

    def packed_scores(self, x: Tensor, weight: PackedWeight) -> Tensor: ...

    def quantized_linear(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor: ...

    def invariant_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor
    ) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
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
    ) -> Tensor: ...

    def packed_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        base: Tensor | None = None,
        base_gate: Tensor | None = None,
        *,
        activation: str = "silu",
        share: ExpertShare = ALL_EXPERTS,
        loads: Tensor | None = None,
    ) -> Tensor: ...
