"""NativeOps: the ops for CPUs, computed by the C library.

``baton_kernels.reference`` defines each op, and computes tensors that the library does not support.
The library supports float32, bfloat16 and float16 with contiguous rows, and computes in float32. A
row's result does not depend on the other rows of the batch. Refuses to know: when these ops are
chosen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.low_rank import LowRankPart, LowRankSlots, LowRankSpan
from baton_kernels.native.library import (
    AttentionCall,
    CollectiveCall,
    ConvCall,
    ExpertsCall,
    GatedCall,
    GatedNormCall,
    GroupedLinearCall,
    IntegersCall,
    JoinCall,
    LargestCall,
    LatentStoreCall,
    LendersCall,
    LinearCall,
    LowRankCall,
    LowRankPartCall,
    LowRankSpanCall,
    NormCall,
    PackCall,
    PlacesCall,
    PointToPointCall,
    RankGroup,
    RecurrenceCall,
    RouteCall,
    SoftenCall,
    StoreCall,
    UnpackCall,
    load_library,
)
from baton_kernels.native.tape import Recorder, Result, Tape, check, record
from baton_kernels.packed import Float8Rows, GroupedIntegers, Groups, PackedWeight, WeightFormat
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.reference import FP8
from baton_kernels.routing import (
    ALL_EXPERTS,
    MOST_EXPERT_RANKS,
    ExpertShare,
    Routing,
    Scoring,
)
from baton_kernels.row_tiles import RowTiles
from baton_kernels.state_metadata import StateMetadata

# Codes by which the C library knows dtypes, as in vectors.h.
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, FP8: 3, torch.float16: 4}
_ACTIVATIONS = {
    "silu": 1,
    "gelu_tanh": 2,
    "gelu": 3,
    reference.CLAMPED_SWIGLU: 4,
    "sigmoid": 5,
    "relu": 6,
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_KERNEL_SIZE = 16  # longest kernel of a convolution, for which C has room on the stack
_MAX_KEY_DIM = 512  # largest key_dim of a recurrence, for which C has room on the stack
_FORMATS = {
    WeightFormat.FP32: 0,
    WeightFormat.BF16: 1,
    WeightFormat.FP16: 4,
    WeightFormat.INT8_WEIGHT_ONLY: 2,
    WeightFormat.FP8: 3,
    WeightFormat.INT8: 5,
    WeightFormat.INT4: 6,
    WeightFormat.INT6: 8,
}
_E2M1 = 7


class NativeOps:
    """The ops for CPUs. All threads share one instance, but each has separate scratch memory.

    Attributes:
        panel_width: number of outputs in a panel of packed weights.
        has_bfloat16: whether this CPU has instructions that multiply bfloat16.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._recorder = Recorder()
        self.panel_width: int = library.baton_panel()
        self.has_bfloat16: bool = library.baton_has_bfloat16() == 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute ``reference.rms_norm`` with native kernels."""
        size = x.shape[-1]
        if not (_plain(x) and _is_weight(weight, x, (size,))):
            return reference.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        call = NormCall(
            *(_CODES[x.dtype], torch.get_num_threads(), x.numel() // size, size),
            *(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None, eps),
            *(_is_wide(weight, x), 1.0, 1.0),
        )
        self._run(self._library.baton_rms_norm, call, x, weight, out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute ``reference.add_rms_norm`` with native kernels."""
        size = x.shape[-1]
        alike = _plain(x, residual) and x.shape == residual.shape
        if not (alike and _is_weight(weight, x, (size,))):
            return reference.add_rms_norm(x, residual, weight, eps, factor)
        out, new_residual = torch.empty_like(x), torch.empty_like(x)
        call = NormCall(
            *(_CODES[x.dtype], torch.get_num_threads(), x.numel() // size, size, x.data_ptr()),
            *(residual.data_ptr(), weight.data_ptr(), out.data_ptr(), new_residual.data_ptr()),
            *(eps, _is_wide(weight, x), factor, 1.0),
        )
        tensors = (x, residual, weight, out, new_residual)
        self._run(self._library.baton_rms_norm, call, *tensors)
        return out, new_residual

    def scaled_add(
        self, x: Tensor, residual: Tensor, factor: float = 1.0, sum_factor: float = 1.0
    ) -> Tensor:
        """Compute ``reference.scaled_add`` with native kernels."""
        if not (_plain(x, residual) and x.shape == residual.shape):
            return reference.scaled_add(x, residual, factor, sum_factor)
        size, total = x.shape[-1], torch.empty_like(x)
        call = NormCall(
            *(_CODES[x.dtype], torch.get_num_threads(), x.numel() // size, size, x.data_ptr()),
            *(residual.data_ptr(), None, None, total.data_ptr(), 0.0, 0, factor, sum_factor),
        )
        self._run(self._library.baton_rms_norm, call, x, residual, total)
        return total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute ``reference.silu_mul`` with native kernels."""
        return self.gated_mul(gate_up, "silu")

    def gated_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Compute ``reference.gated_mul`` with native kernels."""
        size = gate_up.shape[-1] // 2
        if not _plain(gate_up):
            return reference.gated_mul(gate_up, activation)
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        gate = gate_up.data_ptr()
        call = GatedCall(
            *(_CODES[gate_up.dtype], torch.get_num_threads(), out.numel() // size, size),
            *(2 * size, 2 * size, gate, gate + size * gate_up.itemsize, out.data_ptr()),
            _ACTIVATIONS[activation],
        )
        self._run(self._library.baton_gated_mul, call, gate_up, out)
        return out

    def gate_mul(self, gate: Tensor, x: Tensor, activation: str) -> Tensor:
        """Compute ``reference.gate_mul`` with native kernels."""
        fits = x.dtype in _FLOATS and activation != reference.CLAMPED_SWIGLU
        if not (fits and gate.shape == x.shape and _has_rows(x.dtype, gate, x)):
            return reference.gate_mul(gate, x, activation)
        num_rows, size = x.shape
        out = x.new_empty(num_rows, size)
        call = GatedCall(
            *(_CODES[x.dtype], torch.get_num_threads(), num_rows, size),
            *(gate.stride(0), x.stride(0), gate.data_ptr(), x.data_ptr(), out.data_ptr()),
            _ACTIVATIONS[activation],
        )
        self._run(self._library.baton_gated_mul, call, gate, x, out)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Compute ``reference.soft_cap`` with native kernels."""
        if not (_plain(x) and x.numel()):
            return reference.soft_cap(x, cap)
        size, out = x.shape[-1], torch.empty_like(x)
        call = SoftenCall(
            *(_CODES[x.dtype], torch.get_num_threads(), x.numel() // size, size),
            *(x.data_ptr(), out.data_ptr(), cap),
        )
        self._run(self._library.baton_soft_cap, call, x, out)
        return out

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute ``reference.join`` with native kernels."""
        if not _plain(x, y):
            return reference.join(x, y)
        out = x.new_empty(len(x), x.shape[1] + y.shape[1])
        call = JoinCall(
            *(len(x), x.shape[1] * x.itemsize, y.shape[1] * y.itemsize),
            *(x.data_ptr(), y.data_ptr(), out.data_ptr()),
        )
        self._run(self._library.baton_join_rows, call, x, y, out)
        return out

    def largest(self, x: Tensor) -> Tensor:
        """Compute ``reference.largest`` with native kernels."""
        if not _plain(x):
            return reference.largest(x)
        num_rows, size = x.shape
        out = torch.empty(num_rows, dtype=torch.int64)
        call = LargestCall(
            *(_CODES[x.dtype], torch.get_num_threads(), num_rows, size),
            *(x.data_ptr(), out.data_ptr()),
        )
        self._run(self._library.baton_largest, call, x, out)
        return out

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
    ) -> Tensor:
        """Compute ``reference.norm_rotary_store`` with native kernels."""
        of_rotated = [weight for weight in (query_weight, key_weight) if weight is not None]
        weights = [*of_rotated, *(() if value_weight is None else (value_weight,))]
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        fits = _plain(qkv, cos, sin) and kv_cache.dtype in (qkv.dtype, FP8)
        fits = fits and kv_cache.stride(4) == 1
        fits = fits and (slot_mapping is None or slot_mapping.is_contiguous())
        fits = fits and (value_weight is None or _is_weight(value_weight, qkv, (head_dim,)))
        of_heads = all(_is_weight(weight, qkv, (head_dim,)) for weight in of_rotated)
        sizes = (num_heads * head_dim, num_kv_heads * head_dim)
        of_all = len(of_rotated) == 2 and all(
            _is_weight(weight, qkv, (size,)) for weight, size in zip(of_rotated, sizes, strict=True)
        )
        alike = len({weight.dtype for weight in weights}) <= 1
        if not (fits and alike and (of_heads or of_all)):
            return reference.norm_rotary_store(
                *(qkv, num_heads, cos, sin, kv_cache, slot_mapping),
                query_weight=query_weight,
                key_weight=key_weight,
                value_weight=value_weight,
                eps=eps,
                key_scale=key_scale,
                value_scale=value_scale,
            )
        assert slot_mapping is None or slot_mapping.dtype == torch.int64
        out = qkv.new_empty(len(qkv), num_heads, head_dim)
        block_stride, kv_stride, head_stride, token_stride, _ = kv_cache.stride()
        call = StoreCall(
            *(_CODES[qkv.dtype], torch.get_num_threads()),
            *(len(qkv), num_heads, num_kv_heads, head_dim, cos.shape[-1], qkv.shape[-1]),
            *(block_stride, kv_stride, head_stride, token_stride, block_size, qkv.data_ptr()),
            *map(_address, (query_weight, key_weight, value_weight)),
            *(cos.data_ptr(), sin.data_ptr(), kv_cache.data_ptr(), out.data_ptr()),
            *(_address(slot_mapping), eps, _CODES[kv_cache.dtype], 1 / key_scale, 1 / value_scale),
            *(any(_is_wide(weight, qkv) for weight in weights), not of_heads),
        )
        tensors = (qkv, *weights, cos, sin, kv_cache, out, slot_mapping)
        self._run(self._library.baton_norm_rotary_store, call, *tensors)
        return out

    def pack_rows(self, weight: PackedWeight, first_row: int, rows: Tensor) -> None:
        """Compute ``reference.pack_rows`` with native kernels."""
        fits = rows.dtype in _FLOATS and rows.stride(1) == 1
        fits = fits and weight.has_own_groups and weight.width == self.panel_width
        if not fits:
            reference.pack_rows(weight, first_row, rows)
            return
        assert rows.shape[1] == weight.in_features
        assert 0 <= first_row <= first_row + len(rows) <= weight.out_features
        scales, groups = weight.scales, _tensors_of(weight.groups)
        call = PackCall(
            *(_CODES[rows.dtype], _FORMATS[weight.format], torch.get_num_threads()),
            *(first_row, len(rows), weight.in_features, rows.stride(0)),
            *(rows.data_ptr(), weight.panels.data_ptr()),
            *(_address(scales), *map(_address, groups)),
        )
        self._run(self._library.baton_pack_rows, call, rows, weight.panels, scales, *groups)

    def pack_float8(self, weight: PackedWeight, first_row: int, rows: Float8Rows) -> None:
        """Compute ``reference.pack_float8`` with native kernels."""
        numbers = rows.numbers
        if weight.width != self.panel_width or numbers.stride(1) != 1:
            reference.pack_float8(weight, first_row, rows)
            return
        assert numbers.shape[1] == weight.in_features
        assert 0 <= first_row <= first_row + len(numbers) <= weight.out_features
        code = _FORMATS[WeightFormat.FP8]
        call = PackCall(
            *(code, code, torch.get_num_threads()),
            *(first_row, *numbers.shape, numbers.stride(0)),
            *(numbers.data_ptr(), weight.panels.data_ptr()),
        )
        self._run(self._library.baton_pack_rows, call, numbers, weight.panels)
        weight.write_scales(first_row, rows)

    def pack_integers(
        self, weight: PackedWeight, first_row: int, integers: GroupedIntegers
    ) -> None:
        """Compute ``reference.pack_integers`` with native kernels."""
        numbers = integers.numbers
        if weight.width != self.panel_width:
            reference.pack_integers(weight, first_row, integers)
            return
        assert integers.layout == weight.layout
        assert numbers.shape[1] == weight.in_features
        assert 0 <= first_row <= first_row + len(numbers) <= weight.out_features
        least = -(2 ** (integers.bits - 1)) if integers.groups.minima is None else 0
        if integers.is_e2m1:
            numbers, least = integers.codes(), 0
        numbers = numbers.contiguous()
        call = IntegersCall(
            *(_FORMATS[weight.format], torch.get_num_threads()),
            *(first_row, *numbers.shape, least, numbers.data_ptr(), weight.panels.data_ptr()),
        )
        self._run(self._library.baton_pack_integers, call, numbers, weight.panels)
        weight.write_groups(first_row, integers.groups)

    def unpack_rows(
        self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Compute ``reference.unpack_rows`` with native kernels."""
        if weight.width != self.panel_width or ids.dtype != torch.int64:
            return reference.unpack_rows(weight, ids, dtype)
        ids = ids.contiguous()
        if weight.format.code_bits and dtype in (None, *_FLOATS):
            return self._unpack_codes(weight, ids, dtype or torch.float32)
        kept = weight.panels.dtype
        if not (weight.format.keeps_numbers and dtype in (None, kept, torch.float32)):
            return reference.unpack_rows(weight, ids, dtype)
        out = torch.empty(*ids.shape, weight.in_features, dtype=dtype or kept)
        call = UnpackCall(
            *(_CODES[kept], _CODES[out.dtype], torch.get_num_threads()),
            *(ids.numel(), weight.out_features, weight.in_features),
            *(weight.panels.data_ptr(), ids.data_ptr(), out.data_ptr()),
        )
        self._run(self._library.baton_unpack_rows, call, weight.panels, ids, out)
        return out

    def _unpack_codes(self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(*ids.shape, weight.in_features, dtype=dtype)
        call = self._linear_call(ids.view(-1, 1), weight, weight.out_features, out, gated=0)
        tensors = (ids, weight.panels, *_tensors_of(weight.groups), out)
        self._run(self._library.baton_unpack_codes, call, *tensors)
        return out

    def packed_linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Compute ``reference.packed_linear`` with native kernels."""
        if x.dtype not in _FLOATS:
            return self.packed_linear(x.float(), weight).to(x.dtype)
        return self._linear(x, weight, weight.out_features, gated=0)

    def add_low_rank(self, out: Tensor, x: Tensor, spans: Sequence[LowRankSpan]) -> None:
        """Compute ``reference.add_low_rank`` with native kernels."""
        weights = [span.low_rank.a for span in spans]
        weights += [part.b for span in spans for part in span.low_rank.parts]
        fits = x.dtype in _FLOATS and out.dtype == x.dtype and x.stride(1) == out.stride(1) == 1
        fits = fits and all(weight.width == self.panel_width for weight in weights)
        formats = {weight.format for weight in weights}
        if not (fits and len(formats) == 1 and weights[0].format.keeps_numbers):
            reference.add_low_rank(out, x, spans)
            return
        assert all(0 <= span.first <= span.end <= len(x) == len(out) for span in spans)
        assert all(span.low_rank.a.in_features == x.shape[1] for span in spans)
        all_parts: list[LowRankPartCall] = []
        all_spans: list[LowRankSpanCall] = []
        for span in spans:
            parts, a = span.low_rank.parts, span.low_rank.a
            assert all(part.columns.stop <= out.shape[1] for part in parts)
            assert all(part.ranks.stop <= a.out_features for part in parts)
            all_spans.append(
                LowRankSpanCall(
                    *(span.first, span.end - span.first, a.out_features),
                    *(len(all_parts), len(parts), a.panels.data_ptr()),
                )
            )
            all_parts += map(_low_rank_part, parts)
        span_array = (LowRankSpanCall * len(all_spans))(*all_spans)
        part_array = (LowRankPartCall * len(all_parts))(*all_parts)
        call = LowRankCall(
            *(_CODES[x.dtype], _FORMATS[weights[0].format], torch.get_num_threads()),
            *(x.shape[1], x.stride(0), out.stride(0), len(spans), x.data_ptr(), out.data_ptr()),
            *(ctypes.addressof(span_array), ctypes.addressof(part_array)),
        )
        tensors = (tensor for span in spans for tensor in span.low_rank.tensors)
        self._run(self._library.baton_low_rank, call, out, x, span_array, part_array, *tensors)

    def add_low_rank_by_slot(
        self, out: Tensor, x: Tensor, slots: LowRankSlots, ids: Tensor, tiles: RowTiles
    ) -> None:
        """Compute ``reference.add_low_rank_by_slot`` in torch, because this op exists for GPUs."""
        reference.add_low_rank_by_slot(out, x, slots, ids, tiles)

    def quantized_linear(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
    ) -> Tensor:
        """Compute ``reference.quantized_linear`` in torch, because this op exists for GPUs."""
        return reference.quantized_linear(x, weight, bias)

    def invariant_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor
    ) -> Tensor:
        """Compute ``reference.invariant_linear`` in torch, because this op exists for GPUs."""
        return reference.invariant_linear(x, weight, bias, arrived)

    def packed_scores(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Compute ``reference.packed_scores`` with native kernels."""
        if x.dtype not in _FLOATS:
            return self.packed_scores(x.float(), weight)
        out_features = weight.out_features
        return self._linear(x, weight, out_features, gated=0, dtype=torch.float32)

    def packed_gated_linear(
        self, x: Tensor, weight: PackedWeight, activation: str = "silu"
    ) -> Tensor:
        """Compute ``reference.packed_gated_linear``, in one call if gates fill whole panels."""
        num_columns = weight.out_features // 2
        if x.dtype not in _FLOATS or num_columns % self.panel_width:
            return self.gated_mul(self.packed_linear(x, weight), activation)
        return self._linear(x, weight, num_columns, gated=_ACTIVATIONS[activation])

    def _linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        num_columns: int,
        *,
        gated: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiply ``[..., in_features]`` by a packed weight: ``[..., num_columns]``."""
        rows = x if x.dim() == 2 else x.flatten(0, -2)  # [num_rows, in_features]
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        num_rows, in_features = rows.shape
        assert in_features == weight.in_features
        out = rows.new_empty(num_rows, num_columns, dtype=dtype)
        if num_rows:
            call = self._linear_call(rows, weight, num_columns, out, gated=gated)
            self._run(self._library.baton_linear, call, rows, *weight.tensors, out)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    def grouped_packed_linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        """Compute ``reference.grouped_packed_linear`` with native kernels."""
        num_tokens, num_groups, in_features = x.shape
        num_columns = out.shape[2]
        fits = x.dtype in _FLOATS and out.dtype == x.dtype and x.stride(2) == out.stride(2) == 1
        fits = fits and weight.format.keeps_numbers
        if not (fits and weight.width == self.panel_width):
            reference.grouped_packed_linear(x, weight, out)
            return
        assert weight.in_features == in_features
        assert weight.out_features == num_groups * weight.in_whole_panels(num_columns)
        assert out.shape[:2] == x.shape[:2]
        if not num_tokens:
            return
        code = _CODES[x.dtype]
        first = LinearCall(
            *(code, _FORMATS[weight.format], code, torch.get_num_threads(), False),
            *(num_tokens, num_columns, in_features, x.stride(0), out.stride(0)),
            *(x.data_ptr(), weight.panels.data_ptr(), None, None, out.data_ptr()),
            weight.group_size,
        )
        call = GroupedLinearCall(first, num_groups, x.stride(1), out.stride(1))
        self._run(self._library.baton_grouped_linear, call, x, weight.panels, out)

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
    ) -> None:
        """Compute ``reference.norm_rotary_store_latent`` with native kernels."""
        rows = (query, latent, cache, out)
        fits = _plain(cos, sin, weight) and all(row.dtype == cos.dtype for row in rows)
        fits = fits and all(row.stride(-1) == 1 for row in rows) and slot_mapping.is_contiguous()
        if not fits:
            reference.norm_rotary_store_latent(
                *(query, latent, cos, sin, cache, slot_mapping),
                weight=weight,
                eps=eps,
                interleaved=interleaved,
                out=out,
            )
            return
        assert slot_mapping.dtype == torch.int64
        num_tokens, num_heads, rotary_dim = query.shape
        assert out.shape == query.shape
        assert cos.shape == sin.shape == (num_tokens, rotary_dim)
        assert latent.shape[1] == cache.shape[2] == len(weight) + rotary_dim
        call = LatentStoreCall(
            *(_CODES[query.dtype], torch.get_num_threads()),
            *(num_tokens, num_heads, len(weight), rotary_dim, interleaved),
            *(latent.stride(0), *query.stride()[:2], *out.stride()[:2]),
            *(*cache.stride()[:2], cache.shape[1], query.data_ptr(), latent.data_ptr()),
            *(weight.data_ptr(), cos.data_ptr(), sin.data_ptr(), cache.data_ptr()),
            *(out.data_ptr(), slot_mapping.data_ptr(), eps),
        )
        tensors = (query, latent, weight, cos, sin, cache, out, slot_mapping)
        self._run(self._library.baton_store_latent, call, *tensors)

    def _linear_call(
        self,
        rows: Tensor,
        weight: PackedWeight,
        num_columns: int,
        out: Tensor | None = None,
        *,
        gated: int,
    ) -> LinearCall:
        groups = _tensors_of(weight.groups)
        # Indices (int64) have no dtype code, and the C function needs none for them.
        code = 0 if rows.dtype == torch.int64 else _CODES[rows.dtype]
        types = (0 if one is None else _CODES[one.dtype] for one in groups[:3])
        out_code = code if out is None else _CODES[out.dtype]
        return LinearCall(
            *(code, _E2M1 if weight.is_e2m1 else _FORMATS[weight.format], out_code),
            *(torch.get_num_threads(), gated),
            *(len(rows), num_columns, weight.in_features, rows.stride(0), num_columns),
            *(rows.data_ptr(), weight.panels.data_ptr()),
            *(_address(weight.scales), _address(weight.bias), _address(out)),
            *(weight.group_size, *types, weight.has_fine_inputs, *map(_address, groups)),
        )

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``reference.route`` with native kernels."""
        per_expert = [one for one in (bias, scales) if one is not None]
        if not (_plain(logits) and all(one.dtype == torch.float32 for one in per_expert)):
            return reference.route(logits, routing, bias, scales)
        num_tokens, num_experts = logits.shape
        ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int64)
        weights = torch.empty(num_tokens, routing.top_k)
        call = RouteCall(
            *(_CODES[logits.dtype], torch.get_num_threads(), num_tokens, num_experts),
            *(routing.top_k, list(Scoring).index(routing.scoring), routing.normalize),
            *(routing.num_groups, routing.top_groups, routing.group_best, logits.data_ptr()),
            *(_address(bias), _address(scales), ids.data_ptr(), weights.data_ptr()),
            routing.scale,
        )
        self._run(self._library.baton_route, call, logits, *per_expert, ids, weights)
        return ids, weights

    def experts(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Compute ``reference.experts`` in torch, because native kernels need packed weights."""
        return reference.experts(x, *arguments, **options)

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
    ) -> Tensor:
        """Compute ``reference.packed_experts`` with native kernels."""
        hidden, middle = x.shape[1], gate_up.in_whole_panels(down.in_features)
        squares = activation == reference.RELU2
        fits = _plain(x) and (base is None or _plain(x, base)) and gate_up.width == self.panel_width
        if not fits:
            return reference.packed_experts(
                *(x, ids, weights, gate_up, down, base, base_gate),
                activation=activation,
                share=share,
                loads=loads,
            )
        num_experts = down.out_features // down.in_whole_panels(hidden)
        assert down.out_features == num_experts * down.in_whole_panels(hidden)
        assert gate_up.out_features == num_experts * middle * (1 if squares else 2)
        assert ids.dtype == torch.int64
        assert weights.dtype == torch.float32
        assert base_gate is None or base_gate.dtype == torch.float32
        assert share.size <= MOST_EXPERT_RANKS
        out = torch.empty_like(x)
        call = ExpertsCall(
            self._linear_call(x, gate_up, middle, gated=0 if squares else _ACTIVATIONS[activation]),
            self._linear_call(x, down, hidden, gated=0),
            *(len(x), num_experts, ids.shape[1], hidden),
            *(torch.get_num_threads(), x.stride(0), squares, share.rank, share.size),
            *(ids.data_ptr(), weights.data_ptr(), x.data_ptr()),
            *(_address(base), _address(base_gate), out.data_ptr(), _address(loads)),
        )
        tensors = (x, ids, weights, *gate_up.tensors, *down.tensors, base, base_gate, out, loads)
        self._run(self._library.baton_experts, call, *tensors)
        return out

    def attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor | None:
        """Compute ``reference.paged_attention``; return None if the library lacks the dtypes."""
        scale, sliding_window, soft_cap, value_dim, sinks = options
        table = metadata.block_table
        assert sinks is None or sinks.dtype == torch.float32
        fits = _plain(query) and kv_cache.dtype in (query.dtype, FP8) and kv_cache.stride(4) == 1
        if not (fits and table.dtype == torch.int32 and table.stride(-1) == 1):
            return None
        num_tokens, num_heads, head_dim = query.shape
        block_stride, kv_stride, head_stride, token_stride, _ = kv_cache.stride()
        value_dim = head_dim if value_dim is None else value_dim
        out = query.new_empty(num_tokens, num_heads, value_dim)
        call = AttentionCall(
            *(_CODES[query.dtype], _CODES[kv_cache.dtype]),
            *(torch.get_num_threads(), num_tokens, metadata.num_requests),
            *(table.stride(0), num_heads, kv_cache.shape[2], head_dim, kv_cache.shape[3]),
            value_dim,
            *(block_stride, kv_stride, head_stride, token_stride, sliding_window or 0),
            *(query.data_ptr(), kv_cache.data_ptr(), out.data_ptr()),
            *(metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr()),
            *(table.data_ptr(), scale, soft_cap or 0.0),
            None if sinks is None else sinks.data_ptr(),
            None if metadata.row_ends is None else metadata.row_ends.data_ptr(),
        )
        tensors = (metadata.query_start_loc, metadata.seq_lens, table, sinks, metadata.row_ends)
        self._run(self._library.baton_attention, call, query, kv_cache, out, *tensors)
        return out

    def attend_runs(
        self, query: Tensor, keys_values: Tensor, runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Compute ``reference.attend_runs`` with native kernels.

        The kernel of paged attention computes this: each run is passed as a request with one block.
        """
        found, first = [], 0
        for count, length in runs:
            rows = slice(first, first + count * length)
            # [count, 2, num_heads, length, head_dim], no copy
            by_run = keys_values[rows].view(count, length, *keys_values.shape[1:])
            blocks = by_run.permute(0, 2, 3, 1, 4)
            options = AttentionOptions(scale=query.shape[2] ** -0.5)
            attended = self.attention(query[rows], blocks, _whole_runs(count, length), options)
            if attended is None:
                return reference.attend_runs(query, keys_values, runs)
            found.append(attended)
            first += count * length
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def find_run(self) -> Callable[[int, int, int, int], int]:
        """Return the C function that implements `lookup.find_run` for int32 tokens.

        The function takes the tokens' address and number, and the minimum and maximum length of a
        run. It returns the position after the earlier copy, or -1.
        """
        found: Callable[[int, int, int, int], int] = self._library.baton_find_run
        return found

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        group_size: int,
        norm_before_gate: bool,
    ) -> Tensor:
        """Compute ``reference.gated_rms_norm`` with native kernels."""
        num_rows, size = x.shape
        assert size % group_size == 0
        assert len(weight) in (size, group_size)
        if not (_plain(weight) and _has_rows(weight.dtype, x, gate)):
            return reference.gated_rms_norm(
                x, gate, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate
            )
        out = x.new_empty(num_rows, size)
        call = GatedNormCall(
            *(_CODES[x.dtype], torch.get_num_threads(), num_rows, size, group_size, len(weight)),
            *(norm_before_gate, x.stride(0), gate.stride(0)),
            *(x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr(), eps),
        )
        self._run(self._library.baton_gated_rms_norm, call, x, gate, weight, out)
        return out

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
    ) -> Tensor:
        """Compute ``reference.causal_conv`` with native kernels."""
        num_tokens, num_channels = x.shape
        gates = [gate for gate in (in_gate, out_gate) if gate is not None]
        fits = _plain(weight, *([] if bias is None else [bias])) and _has_rows(x.dtype, x, *gates)
        fits = fits and weight.dtype == states.dtype == x.dtype
        if not (fits and weight.shape[1] <= _MAX_KERNEL_SIZE):
            return reference.causal_conv(
                *(x, weight, bias, states, metadata),
                has_silu=has_silu,
                in_gate=in_gate,
                out_gate=out_gate,
            )
        out = x.new_empty(num_tokens, num_channels)
        call = ConvCall(
            *(_CODES[x.dtype], torch.get_num_threads(), num_channels, weight.shape[1], has_silu),
            x.stride(0),
            *(0 if gate is None else gate.stride(0) for gate in (in_gate, out_gate)),
            *(*states.stride(), x.data_ptr(), weight.data_ptr()),
            *(None if one is None else one.data_ptr() for one in (bias, in_gate, out_gate)),
            *(states.data_ptr(), out.data_ptr(), *_step(metadata, num_tokens)),
        )
        tensors = (x, weight, bias, in_gate, out_gate, states, out, *_loc(metadata))
        self._run(self._library.baton_causal_conv, call, *tensors)
        return out

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
    ) -> Tensor:
        """Compute ``reference.selective_scan`` with native kernels."""
        out = self._recurrence(c, b, x, dt, None, a_log, dt_bias, d, states, metadata)
        if out is None:
            return reference.selective_scan(x, dt, b, c, a_log, dt_bias, d, states, metadata)
        return out

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
    ) -> Tensor:
        """Compute ``reference.gated_delta_rule`` with native kernels."""
        out = self._recurrence(query, key, value, a, b, a_log, dt_bias, None, states, metadata)
        if out is None:
            return reference.gated_delta_rule(
                query, key, value, a, b, a_log, dt_bias, states, metadata
            )
        return out

    def _recurrence(
        self,
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
    ) -> Tensor | None:
        """Compute the gated delta rule, or, if ``beta`` is None, the selective scan.

        Returns None if the library does not support the tensors.
        """
        num_tokens, num_heads, value_dim = value.shape
        num_key_heads, key_dim = key.shape[1:]
        constants = [one for one in (log_decay, rate_bias, skip) if one is not None]
        by_token = [one for one in (rate, beta) if one is not None]
        fits = _plain(*constants) and log_decay.dtype == value.dtype == rate.dtype
        fits = fits and _has_rows(value.dtype, query, key, value, *by_token)
        fits = fits and states.dtype == torch.float32 and _is_gapless(states)
        if not (fits and key_dim <= _MAX_KEY_DIM):
            return None
        assert num_heads % num_key_heads == 0
        assert states.shape[1:] == (num_heads, key_dim, value_dim)
        out = value.new_empty(num_tokens, num_heads, value_dim)
        pointers = (query, key, value, rate, rate_bias, log_decay, beta, skip, states, out)
        call = RecurrenceCall(
            *(_CODES[value.dtype], torch.get_num_threads()),
            *(num_heads, num_key_heads, key_dim, value_dim),
            *(query.stride(0), key.stride(0), value.stride(0), rate.stride(0)),
            *(0 if beta is None else beta.stride(0), states.stride(0)),
            *(None if one is None else one.data_ptr() for one in pointers),
            *_step(metadata, num_tokens),
        )
        self._run(self._library.baton_recurrence, call, *pointers, *_loc(metadata))
        return out

    def record(self, compute: Callable[[], Result]) -> tuple[Tape, Result]:
        """Run ``compute``, and record this thread's native calls; see ``tape.record``."""
        return record(self._recorder, self._library, compute)

    def _run(
        self, function: Any, call: ctypes.Structure, *owners: Tensor | ctypes.Array[Any] | None
    ) -> None:
        check(function(call))
        if self._recorder.tape is not None:
            self._recorder.tape.add(function, call, owners)

    def collect(self, group: RankGroup, tensor: Tensor, gathered: Tensor | None = None) -> bool:
        """Sum the tensors of all ranks in place, or gather them.

        Returns False if the library does not support the tensor.

        Args:
            group: the group of ranks, in shared memory.
            tensor: this rank's tensor.
            gathered: ``[size, *tensor.shape]``, receives the tensors of all ranks; None: sum.
        """
        if not _plain(tensor) or (gathered is not None and not _plain(gathered)):
            return False
        out = tensor if gathered is None else gathered
        call = CollectiveCall(
            *(_CODES[tensor.dtype], int(gathered is not None), tensor.numel()),
            *(ctypes.addressof(group), tensor.data_ptr(), out.data_ptr()),
        )
        self._run(self._library.baton_collective, call, tensor, out)
        return True

    def send(self, group: RankGroup, tensor: Tensor) -> None:
        """Copy a contiguous tensor into this rank's ring; wait while the ring is full.

        Raises ConnectionAbortedError if the receiver is gone.
        """
        call = PointToPointCall(tensor.nbytes, 0, ctypes.addressof(group), tensor.data_ptr())
        check(self._library.baton_send(call))

    def receive(self, group: RankGroup, tensor: Tensor, sender: int) -> None:
        """Wait for a tensor of rank ``sender``, and copy it into the contiguous ``tensor``.

        Raises ConnectionAbortedError if the sender is gone.
        """
        call = PointToPointCall(tensor.nbytes, sender, ctypes.addressof(group), tensor.data_ptr())
        check(self._library.baton_receive(call))

    def place_threads(
        self, num_own_threads: int, own: frozenset[int], num_more: int, lent: frozenset[int]
    ) -> bool:
        """Pin the calling thread and the threads that compute for it to cores.

        Args:
            num_own_threads: number of threads to pin to the process's own cores.
            own: the process's own cores.
            num_more: number of further threads, to pin to borrowed cores.
            lent: cores that idle processes lend.

        Returns:
            Whether all threads were pinned.
        """
        size = (max(own | lent) // 64 + 1) * 8  # whole words, like Linux's masks of cores
        own_set, lent_set = (
            sum(1 << core for core in cores).to_bytes(size, "little") for cores in (own, lent)
        )
        num_threads = num_own_threads + num_more
        call = PlacesCall(num_threads, num_own_threads, size, own_set, lent_set)
        return not self._library.baton_place_threads(call)

    def watch_lenders(self, num_own_threads: int, lenders: Sequence[int]) -> None:
        """Make the calling thread use borrowed cores only while their owner is idle.

        Args:
            num_own_threads: number of threads on the process's own cores.
            lenders: for each process that lends cores, the address of two bytes, valid until the
                next call. The first byte is set while the lender computes, the second while this
                thread computes on the lender's cores. Empty: no cores are borrowed.
        """
        addresses = (ctypes.c_void_p * len(lenders))(*lenders)
        call = LendersCall(num_own_threads, len(lenders), ctypes.addressof(addresses))
        failed = self._library.baton_watch_lenders(call)
        assert not failed, f"cores of {len(lenders)} lenders"

    def abort_ranks(self, group: RankGroup) -> None:
        """Make all calls with a group fail from now on; safe from any thread."""
        self._library.baton_abort_ranks(group)


def load_native_ops() -> NativeOps | None:
    """Load the ops; if the library is missing, log one line and return None."""
    library = load_library()
    return None if library is None else NativeOps(library)


def _low_rank_part(part: LowRankPart) -> LowRankPartCall:
    return LowRankPartCall(
        *(part.first_rank, part.b.in_features, part.first_column, part.b.out_features),
        *(part.b.panels.data_ptr(), _address(part.gains), _address(part.shifts)),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tensors_of(groups: Groups | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if groups is None else groups.tensors


def _whole_runs(count: int, length: int) -> AttentionMetadata:
    """Make metadata in which run i is a request with block i; rows attend to the whole run."""
    num_rows = count * length
    lengths = torch.full((count,), length, dtype=torch.int32)
    return AttentionMetadata(
        num_requests=count,
        num_tokens=num_rows,
        query_start_loc=torch.arange(0, num_rows + 1, length, dtype=torch.int32),
        seq_lens=lengths,
        block_table=torch.arange(count, dtype=torch.int32)[:, None],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=length,
        max_seq_len=length,
        query_lens=(length,) * count,
        seq_lens_host=(length,) * count,
        row_ends=torch.full((num_rows,), length, dtype=torch.int32),
    )


def _plain(*tensors: Tensor) -> bool:
    """Return whether all tensors are contiguous and have the same, supported dtype."""
    dtype = tensors[0].dtype
    return dtype in _FLOATS and all(
        tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors
    )


def _has_rows(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Return whether all tensors have this dtype, and rows without gaps."""
    return all(tensor.dtype == dtype and _is_gapless(tensor) for tensor in tensors)


def _is_gapless(tensor: Tensor) -> bool:
    """Return whether each row of a tensor (an index of the first dimension) is contiguous."""
    return tensor[:1].is_contiguous()


def _loc(metadata: StateMetadata) -> tuple[Tensor, ...]:
    """Return the tensors that tell where a step's segments and their states are."""
    return (
        metadata.segment_start_loc,
        metadata.read_slots,
        metadata.write_slots,
        metadata.request_start_loc,
    )


def _step(metadata: StateMetadata, num_tokens: int) -> tuple[int, ...]:
    """Return the values of the fields of ``state_step`` in states.c."""
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in _loc(metadata))
    num_requests = len(metadata.request_start_loc) - 1
    return (num_requests, num_tokens, *(one.data_ptr() for one in _loc(metadata)))


def _is_weight(weight: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether kernels support a norm's weight: shape, and dtype of ``x`` or float32."""
    known = (x.dtype, torch.float32)
    return weight.shape == shape and weight.dtype in known and weight.is_contiguous()


def _is_wide(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype != x.dtype
