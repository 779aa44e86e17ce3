"""Estimates, from a model's configuration, the FLOPs of a step and the bytes that it reads.

Only matrix products count as FLOPs, and only weights and KV as bytes. Refuses to know: tensors
(this module does not import torch), steps, devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.kv.layers import shared_layers
from baton.kv.manifest import shard
from models.config import ModelConfig
from models.memory_needs import expert_matrices, layer_matrices, memory_needs
from models.recipe import AttentionSpec, LatentSpec, LayerSpec, Matrix


class AttentionWork(NamedTuple):
    """Attention's FLOPs and bytes, summed over a model's layers with the same window.

    Attributes:
        window: number of tokens that a token attends to, including itself; None: all tokens.
        flops: FLOPs per pair of tokens of which one attends to the other.
        kv_bytes: bytes of KV that are read for each token to which a token attends.
    """

    window: int | None
    flops: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """FLOPs, and bytes of weights and KV, that a model's steps need.

    Attributes:
        token_flops: FLOPs per token, without attention to other tokens and without the output head.
        head_flops: FLOPs of the output head per token whose logits are computed.
        attention: work of the layers with attention, by window.
        weight_bytes: bytes of the weights that every step reads.
        expert_bytes: bytes of the experts of all layers; a step reads only the chosen experts.
        num_experts, top_k: number of experts of a layer, and of experts per token; 0: no experts.
    """

    token_flops: float
    head_flops: float
    attention: tuple[AttentionWork, ...]
    weight_bytes: float
    expert_bytes: float
    num_experts: int = 0
    top_k: int = 0

    def expert_share(self, num_tokens: int) -> float:
        """Return the share of a layer's experts that ``num_tokens`` tokens are expected to use.

        Each token is assumed to choose its experts at random.
        """
        if not self.num_experts:
            return 0.0
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens


def model_work(
    config: ModelConfig, *, dtype: str, weights: str = "auto", kv_cache_dtype: str = "auto"
) -> ModelWork:
    """Compute a model's FLOPs and bytes per token and per step.

    Args:
        dtype: type of the computation.
        weights: format of the linear layers, a value of ``--weights``.
        kv_cache_dtype: ``auto`` (equal to ``dtype``) or ``fp8``.
    """
    latents = Counter(
        one for layer in config.layers for one in layer.mixer.exact_matrices(config.hidden_size)
    )
    dense = _size(layer_matrices(config)) + _size(latents)
    experts, moe = _size(expert_matrices(config)), config.experts
    share = 0.0 if moe is None else moe.top_k / moe.num_experts
    needs = memory_needs(config, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    head = config.vocab_size * config.hidden_size
    weight_bytes = float(needs.weights[weights])
    expert_bytes = weight_bytes * experts / max(dense + experts + head, 1)
    if not config.tie_word_embeddings:  # a step reads only a few rows of an untied embedding
        weight_bytes -= weight_bytes * head / max(dense + experts + 2 * head, 1)
    return ModelWork(
        token_flops=2.0 * (dense + share * experts),
        head_flops=2.0 * head,
        attention=_attention(config.layers, needs.kv_value_bytes),
        weight_bytes=weight_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.top_k,
    )


def layers_by_decodes(config: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage with which the stages take equal time to decode.

    The last stage also computes logits. Empty if equal numbers of layers are as good, if there is
    one stage, or if the numbers would part a layer from the layer whose KV it reads.
    """
    num_layers = config.num_layers
    if not 1 < num_stages <= num_layers:
        return ()
    experts, moe = _size(expert_matrices(config)), config.experts
    used = experts * moe.top_k / moe.num_experts if moe is not None else 0.0
    in_all = _size(layer_matrices(config)) + used
    head = config.vocab_size * config.hidden_size * num_layers / max(in_all, 1)  # in layers

    def slowest(num_last: int) -> float:
        return max(-(-(num_layers - num_last) // (num_stages - 1)), num_last + head)

    most = num_layers // num_stages
    num_last = min(range(most, 0, -1), key=slowest)
    before = num_stages - 1
    spans = [shard(num_layers - num_last, stage, before) for stage in range(before)]
    ends = [end for _, end in spans]
    sources = shared_layers([layer.mixer.kv for layer in config.layers]).items()
    parts_kv = any(source < end <= reader for end in ends for reader, source in sources)
    if num_last == most or parts_kv:
        return ()
    return (*(end - first for first, end in spans), num_last)


def _attention(layers: Sequence[LayerSpec], value_bytes: int) -> tuple[AttentionWork, ...]:
    """Return the work of attention by window, summed over the layers with this window.

    A layer without KV of its own reads as many bytes as the layer whose KV it reads.
    """
    sources = shared_layers([layer.mixer.kv for layer in layers])
    found: dict[int | None, AttentionWork] = {}
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec | LatentSpec):
            window = mixer.window if isinstance(mixer, AttentionSpec) else None
            kept = layers[sources.get(index, index)].mixer.kv
            before = found.get(window, AttentionWork(window, 0, 0))
            found[window] = AttentionWork(
                window,
                before.flops + mixer.attended_flops,
                before.kv_bytes + kept.token_values * value_bytes,
            )
    return tuple(found.values())


def _size(matrices: Mapping[Matrix, int]) -> int:
    """Return the number of elements of all matrices, given how many there are of each shape."""
    return sum(number * outputs * inputs for (outputs, inputs), number in matrices.items())
