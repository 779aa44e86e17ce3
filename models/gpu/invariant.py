"""InvariantPacker: makes GPU layers whose result for a token does not depend on the batch.

Refuses to know: attention, files, how a product is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from baton.checkpoint.weights_cache import CacheEntry
from models.decoder import DecoderForCausalLM
from models.gpu.packing import GpuPacker
from models.layers.linear import InvariantLinear
from models.layers.moe import SparseMoe
from models.loading.loader import PackingModel
from models.loading.stored_weights import WeightPart


@dataclass(frozen=True, slots=True)
class InvariantPacker:
    """A ``WeightPacker`` that keeps weights unchanged, but uses batch-invariant products.

    Attributes:
        kind: the GPU's model; results are equal only on GPUs of one model.
        int8: packer of layers whose weights and inputs are int8, because sums of integers do not
            depend on the order; None: no layer is int8.
    """

    kind: str
    int8: GpuPacker | None = None
    cache_key: ClassVar[None] = None

    def start(self, model: DecoderForCausalLM, entry: CacheEntry | None = None) -> PackingModel:
        """Start making a model batch-invariant; ``entry`` is None."""
        return _Packing(model, None if self.int8 is None else self.int8.start(model))


class _Packing:
    """Makes one model's linear layers batch-invariant; a ``PackingModel``."""

    takes_float8 = False

    def __init__(self, model: DecoderForCausalLM, int8: PackingModel | None) -> None:
        self._model, self._int8 = model, int8

    def take_kept(self, owner: nn.Module) -> bool:
        """Use the packed weight of ``owner`` from the cache; return whether the cache has one."""
        return False

    def take(self, owner: nn.Module, parts: Sequence[WeightPart]) -> bool:
        """Let the packer of int8 layers pack a weight; return whether it was packed."""
        return self._int8 is not None and self._int8.take(owner, parts)

    def finish(self) -> None:
        """Replace all linear layers by batch-invariant ones; a tied head shares the embedding."""
        if self._int8 is not None:
            self._int8.finish()
        model = self._model
        experts = [one for one in model.modules() if isinstance(one, SparseMoe)]
        of_experts = [layer for one in experts for layer in (one.gate_up, one.down)]
        for moe in experts:
            moe.invariant = True
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.Linear) and child not in of_experts:
                    setattr(parent, name, InvariantLinear.of(child))
        embedding = model.model.embed_tokens
        if model.lm_head is None and isinstance(embedding, nn.Embedding):
            model.lm_head = InvariantLinear(embedding.weight)


__all__ = ["InvariantPacker"]
