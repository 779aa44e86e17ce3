"""GpuPacker: keeps the weights of linear layers on a GPU in 4 or 8 bits.

Embeddings and heads tied to them, experts, routers, and projections of latents stay ordinary
parameters. Refuses to know: architectures, files, how a product is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from baton.checkpoint.weights_cache import CacheEntry
from baton_kernels import (
    GroupedIntegers,
    GroupedWeight,
    QuantizedWeight,
    RoundedWeight,
)
from baton_kernels.packed import FLOAT8, WeightFormat
from baton_kernels.quantized import (
    QuantizedFormat,
    four_bits,
    is_kept,
    rounded_rows,
)
from models.base import CausalLM
from models.decoder import DecoderForCausalLM
from models.layers.latent_attention import LatentProjection
from models.layers.linear import ExactLinear, GatedLinear, QuantizedLinear
from models.layers.moe import SparseMoe
from models.loading.stored_weights import WeightPart, float8_alike, integers_alike

logger = logging.getLogger(__name__)

_ROUNDED = {QuantizedFormat.INT8: torch.int8, QuantizedFormat.FP8: FLOAT8}
_TOO_COARSE_FOR_HEADS = (QuantizedFormat.INT4, QuantizedFormat.FP8)
_NAMES = {torch.int8: "int8", FLOAT8: "fp8"}


@dataclass(frozen=True, slots=True)
class GpuPacker:
    """A ``WeightPacker`` for GPUs; equal packers pack a model equally.

    Attributes:
        device: the weights' device.
        weights: format of all linear layers except a tied head; None: the checkpoint's format. With
            ``INT4`` and ``FP8``, an untied head is ``INT8_WEIGHT_ONLY``, because low precision
            harms the head most.
        has_float8: whether the device can multiply float8 matrices.
    """

    device: torch.device
    weights: QuantizedFormat | None
    has_float8: bool
    cache_key: ClassVar[None] = None

    def start(self, model: DecoderForCausalLM, entry: CacheEntry | None = None) -> _Packing:
        """Start packing a model; ``entry`` is None, because packed GPU weights are not cached."""
        return _Packing(self, model)


class _Packing:
    """Keeps one model's linear layers quantized; a ``PackingModel``."""

    def __init__(self, packer: GpuPacker, model: DecoderForCausalLM) -> None:
        self._packer = packer
        self._model = model
        self._packed: dict[nn.Module, QuantizedWeight] = {}
        quantization = model.config.quantization
        self._rounds_inputs = quantization is not None and quantization.rounds_inputs
        is_asked_for = packer.weights == QuantizedFormat.FP8
        as_stored = packer.weights is None and self._rounds_inputs
        self.takes_float8 = packer.has_float8 and (is_asked_for or as_stored)
        experts = [one for one in model.modules() if isinstance(one, SparseMoe)]
        self._left_alone = {layer for one in experts for layer in (one.gate_up, one.down)}
        if model.vision is not None:
            self._left_alone |= set(model.vision.modules())

    def take_kept(self, owner: nn.Module) -> bool:
        """Use the packed weight of ``owner`` from the cache; return whether the cache has one."""
        return False

    def take(self, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        """Pack the weight of a linear layer if possible; return whether it was packed."""
        if not isinstance(owner, nn.Linear) or isinstance(owner, ExactLinear | LatentProjection):
            return False
        if owner in self._left_alone:
            return False
        weight = self._pack(parts, is_head=owner is self._model.lm_head)
        if weight is None:
            return False
        self._packed[owner] = weight
        return True

    def finish(self) -> None:
        """Put quantized layers in place of the layers whose weights were packed."""
        kinds = Counter(map(_kind, self._packed.values()))
        for parent in list(self._model.modules()):
            for name, child in parent.named_children():
                if child in self._packed:
                    setattr(parent, name, self._layer(child, self._packed.pop(child)))
        if kinds:
            listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            logger.info("linear layers quantized on this GPU: %s", listed)

    def _pack(self, parts: Sequence[WeightPart], *, is_head: bool) -> QuantizedWeight | None:
        wanted = self._packer.weights
        weight = self._keep(parts, wanted)
        if weight is not None or wanted is None:
            return weight
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if is_head and wanted in _TOO_COARSE_FOR_HEADS:
            wanted = QuantizedFormat.INT8_WEIGHT_ONLY
        rounded = _ROUNDED.get(wanted)
        if rounded is not None:
            device = self._packer.device
            made = RoundedWeight.empty(out_features, in_features, rounded, None, device)
            for part in parts:
                for first_row, rows in part.pieces():
                    made.round_rows(first_row, rows)
            return made
        return self._pack_grouped(out_features, wanted, parts)

    def _keep(
        self, parts: Sequence[WeightPart], wanted: QuantizedFormat | None
    ) -> QuantizedWeight | None:
        """Keep a weight in the checkpoint's format.

        Returns None if another format is wanted, or kernels do not support the checkpoint's.
        """
        kept, layout = integers_alike(parts)
        if layout is None:
            return self._keep_float8(parts) if wanted in (None, QuantizedFormat.FP8) else None
        by_row, four = all(map(_is_symmetric_by_row, kept)), layout.format == WeightFormat.INT4
        if by_row and (wanted == QuantizedFormat.INT8 or (wanted is None and self._rounds_inputs)):
            return self._keep_rows(parts, kept)
        if wanted is not None and wanted != (
            QuantizedFormat.INT4 if four else QuantizedFormat.INT8_WEIGHT_ONLY
        ):
            return None
        return self._keep_groups(parts, kept) if is_kept(kept[0]) else None

    def _keep_rows(
        self, parts: Sequence[WeightPart], kept: Sequence[GroupedIntegers]
    ) -> RoundedWeight:
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        sizes = (out_features, in_features, torch.int8, None)
        rounded = RoundedWeight.empty(*sizes, self._packer.device)
        for part, integers in zip(parts, kept, strict=True):
            rounded.write_rows(part.first_row, integers.numbers, integers.groups.scales)
        return rounded

    def _keep_groups(
        self, parts: Sequence[WeightPart], kept: Sequence[GroupedIntegers]
    ) -> GroupedWeight:
        out_features = sum(part.shape[0] for part in parts)
        weight = GroupedWeight.empty(out_features, kept[0], self._packer.device)
        for part, integers in zip(parts, kept, strict=True):
            weight.write_rows(part.first_row, integers)
        return weight

    def _keep_float8(self, parts: Sequence[WeightPart]) -> RoundedWeight | None:
        kept = float8_alike(parts)
        if not kept:
            return None
        first = kept[0]
        weight = RoundedWeight.empty(
            sum(part.shape[0] for part in parts), first.numbers.shape[1], FLOAT8,
            first.group_size, self._packer.device,
        )  # fmt: skip
        for part, rows in zip(parts, kept, strict=True):
            weight.write_rows(part.first_row, rows.numbers, rows.scales)
        return weight

    def _pack_grouped(
        self, out_features: int, wanted: QuantizedFormat, parts: Sequence[WeightPart]
    ) -> GroupedWeight:
        weight: GroupedWeight | None = None
        for part in parts:
            for first_row, rows in part.pieces():
                integers = _integers_of(rows.to(self._packer.device), wanted)
                if weight is None:
                    weight = GroupedWeight.empty(out_features, integers, self._packer.device)
                weight.write_rows(first_row, integers)
        assert weight is not None
        return weight

    @staticmethod
    def _layer(linear: nn.Module, weight: QuantizedWeight) -> QuantizedLinear:
        assert isinstance(linear, nn.Linear)
        bias = None if linear.bias is None else linear.bias.detach()
        activation = linear.activation if isinstance(linear, GatedLinear) else None
        return QuantizedLinear(weight, bias, activation)


def _is_symmetric_by_row(integers: GroupedIntegers) -> bool:
    groups = integers.groups
    return integers.bits == 8 and groups.minima is None and groups.scales.shape[1] == 1


def _integers_of(rows: torch.Tensor, wanted: QuantizedFormat) -> GroupedIntegers:
    if wanted == QuantizedFormat.INT4:
        return four_bits(rows)
    numbers, scales = rounded_rows(rows, torch.int8, rows.shape[1])
    integers = GroupedIntegers.of(8, numbers, scales, rows.shape[1])
    assert integers is not None
    return integers


def quantized_kinds(model: CausalLM) -> list[str]:
    """List which kinds of quantized layers a model has, for example ``fp8 times fp8``."""
    assert isinstance(model, nn.Module)
    layers = [one.quantized for one in model.modules() if isinstance(one, QuantizedLinear)]
    return sorted(set(map(_kind, layers)))


def _kind(weight: QuantizedWeight) -> str:
    if isinstance(weight, RoundedWeight):
        return f"{_NAMES[weight.numbers.dtype]} times {_NAMES[weight.numbers.dtype]}"
    size = "all" if len(weight.groups.scales) == 1 else weight.group_size
    return f"int{weight.bits} in groups of {size}"


__all__ = ["GpuPacker", "quantized_kinds"]
