"""Qwen2, 2.5 and 3, dense and with experts; also as the text part of models that read images.

Qwen2 has biases on queries, keys and values; Qwen3 has a norm on each query and key head instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.checkpoint.gguf.architecture import Architecture, Change, Keys, Names
from models.families.shared.experts import checked, dense_mlp
from models.families.shared.gguf import EXPERTS, expert_size
from models.family import GELU, Family, TextPart
from models.fields import MAX_PARTS, Fields
from models.loading.text_parts import text_fields
from models.model_fields import ModelFields
from models.recipe import AttentionSpec, ExpertsSpec, LayerSpec, Recipe
from models.rope_config import AxesRule
from models.vision.specs import read_qwen2, read_qwen2_5, read_qwen3


def _qwen2(model: ModelFields) -> Recipe:
    windows = model.windows_if_switched_on()
    return model.recipe(model.attention_layers(windows, qkv_bias=True), model.mlp())


def _qwen3_attention(model: ModelFields, windows: list[int | None]) -> list[AttentionSpec]:
    bias = model.attention_bias
    return model.attention_layers(windows, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _qwen3(model: ModelFields) -> Recipe:
    return model.recipe(_qwen3_attention(model, model.windows_if_switched_on()), model.mlp())


def experts_of(fields: Fields, count: str = "num_experts") -> ExpertsSpec:
    """Read the routed experts; their number is the value of the field named ``count``."""
    return ExpertsSpec(
        num_experts=fields.integer(count, maximum=MAX_PARTS),
        inner_size=fields.integer("moe_intermediate_size"),
        top_k=fields.integer("num_experts_per_tok"),
        normalize=fields.boolean("norm_topk_prob", False),
    )


def experts_with_shared(fields: Fields) -> ExpertsSpec:
    """Read the routed experts and the shared expert, whose result a gate scales."""
    shared_size = fields.integer("shared_expert_intermediate_size")
    return replace(experts_of(fields), shared_size=shared_size, has_shared_gate=True)


def dense_layers(model: ModelFields) -> frozenset[int]:
    """Return the indices of layers that have an MLP instead of experts."""
    step = model.fields.integer("decoder_sparse_step", 1)
    named = model.fields.token_ids("mlp_only_layers")
    layers = range(model.num_layers)
    return frozenset(layer for layer in layers if layer in named or (layer + 1) % step)


def _with_experts(model: ModelFields, mixers: list[AttentionSpec], experts: ExpertsSpec) -> Recipe:
    checked(model.fields, experts)
    dense, mlp = dense_layers(model), dense_mlp(model)
    layers = tuple(
        LayerSpec(mixer, mlp if index in dense else experts) for index, mixer in enumerate(mixers)
    )
    return Recipe(layers=layers, ropes=(model.rope,))


def _qwen2_moe(model: ModelFields) -> Recipe:
    """Return the recipe of Qwen2 with experts.

    Without layer types, every second layer below ``max_window_layers`` has a sliding window.
    """
    windows = model.windows_if_switched_on()
    if model.layer_types is None and model.use_sliding_window:
        windows = [
            model.sliding_window if index % 2 == 0 and index < model.max_window_layers else None
            for index in range(model.num_layers)
        ]
    bias = model.fields.boolean("qkv_bias", True)
    mixers = model.attention_layers(windows, qkv_bias=bias)
    return _with_experts(model, mixers, experts_with_shared(model.fields))


def _qwen3_moe(model: ModelFields) -> Recipe:
    window = model.sliding_window if model.use_sliding_window else None
    # Layer types are ignored, as in transformers.
    mixers = _qwen3_attention(model, [window] * model.num_layers)
    return _with_experts(model, mixers, _qwen3_experts(model.fields))


def _qwen3_experts(fields: Fields) -> ExpertsSpec:
    # transformers writes either name; if a file has both, transformers reads num_local_experts.
    count = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    return experts_of(fields, count)


def _qwen3_moe_of_images(model: ModelFields) -> Recipe:
    """Return the recipe of Qwen3-VL with experts, which has no windows."""
    mixers = _qwen3_attention(model, [None] * model.num_layers)
    experts = replace(_qwen3_experts(model.fields), normalize=True, stored_both_ways=True)
    return replace(
        _with_experts(model, mixers, experts),
        stored_prefix="model.language_model.",
        ignored=("model.visual.",),
    )


# Yang et al., arXiv:2407.10671.
Qwen2ForCausalLM = Family(
    recipe=_qwen2,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    activations=GELU,
)
Qwen2MoeForCausalLM = Family(
    recipe=_qwen2_moe, defaults={"num_key_value_heads": 16, "sliding_window": 4096}
)
# Yang et al., arXiv:2505.09388.
Qwen3ForCausalLM = Family(
    recipe=_qwen3,
    defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    activations=GELU,
)
Qwen3MoeForCausalLM = Family(
    recipe=_qwen3_moe, defaults={"num_key_value_heads": 4, "sliding_window": 4096}
)
# In prompts with images, Qwen's RoPE has three axes (frame, row, column). A text token has the same
# position on all axes, so for text alone, RoPE with one axis gives equal results.
Qwen2VLForConditionalGeneration = TextPart(
    "Qwen2ForCausalLM", vision=read_qwen2, axes=AxesRule((16, 24, 24))
)
Qwen2_5_VLForConditionalGeneration = TextPart(
    "Qwen2ForCausalLM", vision=read_qwen2_5, axes=AxesRule((16, 24, 24))
)
Qwen3VLForConditionalGeneration = TextPart(
    "Qwen3ForCausalLM", vision=read_qwen3, axes=AxesRule((24, 20, 20), interleaved=True)
)
Qwen3VLMoeForConditionalGeneration = Family(
    recipe=_qwen3_moe_of_images,
    translate=text_fields,
    defaults={"num_key_value_heads": 16, "rope_theta": 500_000.0},
    vision=read_qwen3,
    axes=AxesRule((24, 20, 20), interleaved=True),
)


# ---------------------------------------------------------------------------- GGUF files


GGUF_SHARED_EXPERT: Names = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _gguf_of_2(keys: Keys) -> Mapping[str, Any]:
    return {"attention_bias": False}  # the recipe has Qwen2's biases, whatever this field says


def gguf_experts(keys: Keys, *, normalized: bool) -> Mapping[str, Any]:
    """Return the experts' fields of config.json.

    Args:
        keys: metadata of the GGUF file.
        normalized: whether the weights of a token's experts sum to 1 if the GGUF file does not say.
    """
    with_experts = keys.layers_with(*EXPERTS)
    dense = sorted(set(keys.layers_with("ffn_up.weight")) - set(with_experts))
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "norm_topk_prob": keys.boolean("expert_weights_norm", normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def gguf_shared(keys: Keys) -> Mapping[str, Any]:
    """Return the shared expert's size as a config.json field."""
    name = "expert_shared_feed_forward_length"
    size = keys.integer(name) if keys.get(name) is not None else keys.rows("ffn_up_shexp.weight")
    return {"shared_expert_intermediate_size": size}


def _gguf_of_2_moe(keys: Keys) -> Mapping[str, Any]:
    biases = {"qkv_bias": keys.has("attn_q.bias"), "attention_bias": False}
    return {**gguf_experts(keys, normalized=False), **gguf_shared(keys), **biases}


def _gguf_of_3_moe(keys: Keys) -> Mapping[str, Any]:
    return gguf_experts(keys, normalized=True)


# A file of a vision-language model has only the text network; the encoder is in another file.
GGUF = {
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("Qwen2ForCausalLM", _gguf_of_2)),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _gguf_of_2_moe,
        names=GGUF_SHARED_EXPERT,
        changes={"ffn_gate_inp_shexp": (Change.ONE_ROW,)},
        may_have_experts=True,
    ),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("Qwen3ForCausalLM")),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe"),
        Architecture("Qwen3MoeForCausalLM", _gguf_of_3_moe, may_have_experts=True),
    ),
}
