"""Estimates a step's FLOPs and bytes of weights and KV, from the model's configuration.

Only matrix products are counted. Refuses to know: tensors (this module does not import torch),
steps, devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from models.config import ModelConfig
from models.memory_needs import expert_matrices, layer_matrices, memory_needs
from models.recipe import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of one model.

    Attributes:
        token_flops: operations per token that do not depend on earlier tokens.
        head_flops: operations per token whose logits are computed.
        attended_flops: a layer's operations per (token, attended token) pair.
        attended_bytes: bytes of KV that a layer reads per (token, attended token) pair.
        weight_bytes: size of the weights that every step reads.
        expert_bytes: size of all layers' experts, of which a step reads only some.
        num_experts, top_k: number of experts of a layer, and number of experts per token; 0: no
            experts.
    """

    token_flops: float
    head_flops: float
    attended_flops: float
    attended_bytes: float
    weight_bytes: float
    expert_bytes: float
    num_experts: int = 0
    top_k: int = 0

    def expert_share(self, num_tokens: int) -> float:
        """Return the expected share of experts that ``num_tokens`` tokens choose at random."""
        if not self.num_experts:
            return 0.0
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens


def model_work(
    config: ModelConfig, *, dtype: str, weights: str = "auto", kv_cache_dtype: str = "auto"
) -> ModelWork:
    """Compute a model's FLOPs and bytes per token and per step.

    Args:
        dtype: type of the computation.
        weights: format of the linear layers.
        kv_cache_dtype: ``auto`` (as ``dtype``) or ``fp8``.
    """
    latents = Counter(
        one for layer in config.layers for one in layer.mixer.exact_matrices(config.hidden_size)
    )
    dense = _size(layer_matrices(config)) + _size(latents)
    experts, moe = _size(expert_matrices(config)), config.experts
    share = 0.0 if moe is None else moe.top_k / moe.num_experts
    needs = memory_needs(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    num_attending = sum(layer.mixer.kv.token_values > 0 for layer in config.layers)
    head = config.vocab_size * config.hidden_size
    weight_bytes = float(needs.weights[weights])
    expert_bytes = weight_bytes * experts / max(dense + experts + head, 1)
    if not config.tie_word_embeddings:  # a step reads only a few rows of an untied embedding
        weight_bytes -= weight_bytes * head / max(dense + experts + 2 * head, 1)
    return ModelWork(
        token_flops=2.0 * (dense + share * experts),
        head_flops=2.0 * head,
        attended_flops=float(config.attention.attended_flops),
        attended_bytes=needs.kv_token_bytes / max(num_attending, 1),
        weight_bytes=weight_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.top_k,
    )


def _size(matrices: Mapping[Matrix, int]) -> int:
    """Return the total number of elements of these matrices, each with its count."""
    return sum(number * outputs * inputs for (outputs, inputs), number in matrices.items())
