"""The ops (kernels) that a model may call; ``baton_kernels.dispatch`` chooses implementations.

``baton_kernels.reference`` defines each op in a function of the same name; ``baton_kernels.ops``
has the signatures. Refuses to know: models, requests, what tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from baton_kernels.dispatch import ops_for
from baton_kernels.low_rank import LowRank, LowRankPart, LowRankSlots, LowRankSpan
from baton_kernels.ops import Ops
from baton_kernels.packed import (
    E2M1_TWICE,
    FORMATS_OF_ROWS,
    CodeLayout,
    Float8Rows,
    GroupedIntegers,
    Groups,
    PackedWeight,
    WeightFormat,
)
from baton_kernels.quantized import GroupedWeight, QuantizedWeight, RoundedWeight
from baton_kernels.reference import (
    FP8,
    count_loads,
    gather_kv,
    paged_attention,
    rotary,
    store_kv,
)
from baton_kernels.routing import ALL_EXPERTS, ExpertShare, Routing, Scoring
from baton_kernels.row_tiles import RowTiles
from baton_kernels.state_metadata import StateMetadata


class _OpsByDevice:
    """``Ops`` whose functions call the fastest implementation for their first tensor's device."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(first: Tensor | PackedWeight, *others: Any, **options: Any) -> Any:
            tensor = first.panels if isinstance(first, PackedWeight) else first
            return getattr(ops_for(tensor), name)(first, *others, **options)

        return call


_ops: Ops = cast("Ops", _OpsByDevice())
rms_norm = _ops.rms_norm
add_rms_norm = _ops.add_rms_norm
scaled_add = _ops.scaled_add
join = _ops.join
largest = _ops.largest
silu_mul = _ops.silu_mul
gated_mul = _ops.gated_mul
gate_mul = _ops.gate_mul
soft_cap = _ops.soft_cap
attend_runs = _ops.attend_runs
norm_rotary_store = _ops.norm_rotary_store
gated_rms_norm = _ops.gated_rms_norm
causal_conv = _ops.causal_conv
selective_scan = _ops.selective_scan
gated_delta_rule = _ops.gated_delta_rule
norm_rotary_store_latent = _ops.norm_rotary_store_latent
grouped_packed_linear = _ops.grouped_packed_linear
pack_rows = _ops.pack_rows
pack_float8 = _ops.pack_float8
pack_integers = _ops.pack_integers
unpack_rows = _ops.unpack_rows
packed_linear = _ops.packed_linear
packed_gated_linear = _ops.packed_gated_linear
packed_scores = _ops.packed_scores
add_low_rank = _ops.add_low_rank
add_low_rank_by_slot = _ops.add_low_rank_by_slot
quantized_linear = _ops.quantized_linear
invariant_linear = _ops.invariant_linear
route = _ops.route
experts = _ops.experts
packed_experts = _ops.packed_experts

__all__ = [
    "ALL_EXPERTS",
    "E2M1_TWICE",
    "FORMATS_OF_ROWS",
    "FP8",
    "CodeLayout",
    "ExpertShare",
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
    "attend_runs",
    "causal_conv",
    "count_loads",
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
