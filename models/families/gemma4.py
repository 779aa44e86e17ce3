"""Gemma 4: heads of two sizes, shared keys and values, per-layer embeddings, experts, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.architecture import Architecture, Keys, no_fields
from baton.checkpoint.gguf.rope import DEFAULT_THETA, ROPE_FACTORS
from models.families.shared.experts import checked
from models.families.shared.gguf import expert_size, layer_types
from models.family import GELU, Family, TextPart
from models.fields import MAX_PARTS, Fields
from models.model_fields import FULL, SLIDING, ModelFields
from models.recipe import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerNorms,
    LayerSpec,
    MlpAndExpertsSpec,
    NormWeight,
    PerLayerEmbeddingSpec,
    Recipe,
)
from models.vision.specs import read_gemma4

_PATTERN = 6  # without layer types, every sixth layer has full attention
_NORMS = LayerNorms(
    before_mixer="input_layernorm",
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_NAMES = {
    ".end.": ".",
    "model.per_layer.": "model.",
    ".mlp.dense.": ".mlp.",
    ".mlp.moe.gate.": ".router.proj.",
    ".mlp.moe.expert_scales": ".router.per_expert_scale",
    ".mlp.router_norm.weight": ".router.scale",
    ".mlp.moe.experts.": ".experts.",
    ".mlp.before_moe.": ".pre_feedforward_layernorm_2.",
    ".mlp.after_dense.": ".post_feedforward_layernorm_1.",
    ".mlp.after_moe.": ".post_feedforward_layernorm_2.",
}
# Sound is not computed.
_OF_SOUND = ("model.audio_tower.", "model.embed_audio.")
_OF_KEYS_AND_VALUES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
_HEADS_OF_FULL = ("head_dim", "num_key_value_heads")
_ROPES: Mapping[str, object] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
# Older fields about RoPE, which transformers does not read for these models.
_UNREAD = ("rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
}


def _without_older_ropes(fields: Fields) -> Fields:
    return fields.with_values(dict.fromkeys(_UNREAD))


def _recipe(model: ModelFields) -> Recipe:
    """Return the recipe of Gemma 4 (Gemma Team, ai.google.dev/gemma/docs/core/model_card_4)."""
    fields = model.fields
    types = _layer_types(model)
    sources = _kv_sources(fields, types)
    per_layer = _per_layer_embedding(model)
    own, shared = _feed_forward(model, 1), _feed_forward(model, 1)
    if fields.boolean("use_double_wide_mlp", False):
        shared = _feed_forward(model, 2)
    mixers = _mixers(model)
    layers = []
    for index, name in enumerate(types):
        if index in sources:
            mixer = replace(mixers[name], kv_distance=index - sources[index])
            layers.append(LayerSpec(mixer, shared))
        else:
            layers.append(LayerSpec(mixers[name], own))
    unread = [
        f"model.layers.{layer}.self_attn.{part}"
        for layer in sources
        for part in _OF_KEYS_AND_VALUES
    ]
    return Recipe(
        layers=tuple(layers),
        ropes=(model.rope, model.sliding_rope or model.rope),
        norms=_NORMS,
        norm_weight=NormWeight.WIDE,
        embedding_scale=model.hidden_size**0.5,
        layer_scalars=True,
        per_layer_embedding=per_layer,
        logits_soft_cap=fields.optional_number("final_logit_softcapping"),
        stored_names=_NAMES,
        ignored=(*_OF_SOUND, *unread),
    )


def _layer_types(model: ModelFields) -> list[str]:
    """Return each layer's type; the last layer has full attention, whatever the file says."""
    layers = range(model.num_layers)
    types = model.layer_types or [FULL if (i + 1) % _PATTERN == 0 else SLIDING for i in layers]
    return [*types[:-1], FULL]


def _mixers(model: ModelFields) -> dict[str, AttentionSpec]:
    """Return the attention of both types of layers."""
    fields, bias = model.fields, model.attention_bias
    sees = fields.get("use_bidirectional_attention")
    if sees not in (None, "vision"):
        raise fields.wrong("use_bidirectional_attention", f"{sees!r} is not supported")
    sliding = model.attention(
        window=model.sliding_window,
        rotation=1,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        value_norm=True,
        norm_weight=NormWeight.WIDE,
        scale=1.0,
        whole_images=sees == "vision",
    )
    if model.sliding_window is None:
        raise fields.wrong("sliding_window", "missing, but some layers have one")
    head_dim, num_kv_heads = _heads_of_full(model)
    full = replace(
        sliding,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        window=None,
        rotation=0,
        whole_images=False,
        values_from_keys=fields.boolean("attention_k_eq_v", False),
    )
    return {FULL: full, SLIDING: sliding}


def _heads_of_full(model: ModelFields) -> tuple[int, int]:
    """Return head size and number of KV heads of the layers with full attention."""
    fields, num_kv_heads = model.fields, model.num_kv_heads
    if fields.has("per_layer_config"):
        found = _per_layer(fields, _layer_types(model))
    elif "per_layer_config" in fields.names():  # null: all layers have heads of one size
        found = Fields({}, "config.json")
    else:
        found = fields.with_values(
            {
                "head_dim": fields.integer("global_head_dim", 512),
                "num_key_value_heads": fields.get("num_global_key_value_heads")
                if fields.boolean("attention_k_eq_v", False)
                else None,
            }
        )
    head_dim = found.integer("head_dim", model.head_dim)
    num_kv_heads = found.integer("num_key_value_heads", num_kv_heads)
    if head_dim % 2:
        raise found.wrong("head_dim", f"{head_dim} is odd, rotary embedding needs pairs")
    if model.num_heads % num_kv_heads:
        problem = f"{num_kv_heads} does not divide {model.num_heads}"
        raise found.wrong("num_key_value_heads", problem)
    return head_dim, num_kv_heads


def _per_layer(fields: Fields, types: Sequence[str]) -> Fields:
    """Return the fields that ``per_layer_config`` gives to all layers with full attention.

    Raises:
        ModelLoadError: other layers have fields, or these layers have different or other fields.
    """
    by_layer = fields.child("per_layer_config")
    full = [str(index) for index, name in enumerate(types) if name == FULL]
    first = by_layer.child(full[0]) if by_layer.has(full[0]) else Fields({}, "config.json")
    alike = all(by_layer.get(name) == by_layer.get(full[0]) for name in full)
    others = sorted({*by_layer.names()} - {*full})
    unknown = sorted({*first.names()} - {*_HEADS_OF_FULL})
    if not alike or others or unknown:
        problem = "only head_dim and num_key_value_heads, equal in all layers with full attention"
        raise fields.wrong("per_layer_config", f"{problem}, are supported")
    return first


def _kv_sources(fields: Fields, types: Sequence[str]) -> dict[int, int]:
    """Return, for each layer that reads another layer's keys and values, the other layer.

    The other layer is the last one of the same type that has keys and values of its own.

    Raises:
        ModelLoadError: no earlier layer of the type has keys and values.
    """
    name = "num_kv_shared_layers"
    shared = fields.integer(name, 0, minimum=0, maximum=len(types) - 1)
    first = len(types) - shared
    last = {kind: index for index, kind in enumerate(types[:first])}
    if shared and last.keys() != set(types):
        raise fields.wrong(name, f"with {shared}, a type of layers has no keys and values")
    return {index: last[types[index]] for index in range(first, len(types))}


def _per_layer_embedding(model: ModelFields) -> PerLayerEmbeddingSpec | None:
    fields, name = model.fields, "vocab_size_per_layer_input"
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    vocab_size = fields.integer(name, 262_144)
    if vocab_size != model.vocab_size:
        raise fields.wrong(name, f"only vocab_size, {model.vocab_size}, is supported")
    pad_token_id = fields.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1)
    return PerLayerEmbeddingSpec(size, model.activation, pad_token_id)


def _feed_forward(model: ModelFields, width: int) -> FeedForwardSpec:
    """Return the feed-forward part of a layer.

    Args:
        width: factor of the MLP's intermediate size.
    """
    fields, mlp = model.fields, model.mlp()
    mlp = replace(mlp, inner_size=width * mlp.inner_size)
    if not fields.boolean("enable_moe_block", False):
        return mlp
    experts = ExpertsSpec(
        num_experts=fields.integer("num_experts", maximum=MAX_PARTS),
        inner_size=fields.integer("moe_intermediate_size"),
        top_k=fields.integer("top_k_experts"),
        normalize=True,
        activation=model.activation,
        has_scales=True,
    )
    return MlpAndExpertsSpec(mlp, checked(fields, experts))


Gemma4ForCausalLM = Family(
    recipe=_recipe,
    translate=_without_older_ropes,
    defaults=_DEFAULTS,
    defaults_for_null={"rope_parameters": _ROPES},
    reads=frozenset({"final_logit_softcapping", "use_bidirectional_attention", "per_layer_config"}),
    activations=GELU,
    activation_field="hidden_activation",
    sliding_window_pattern=_PATTERN,
    ropes_by_layer_type=True,
)
Gemma4ForConditionalGeneration = TextPart("Gemma4ForCausalLM", is_tied=True, vision=read_gemma4)


# ---------------------------------------------------------------------------- GGUF files


# For pairs that RoPE does not rotate, a file divides the frequency by at least this factor.
_UNROTATED = 1e20
_PER_LAYER_TABLE = "per_layer_token_embd.weight"


def _gguf_fields(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json fields that only Gemma 4 has.

    A file lacks the field for images (`use_bidirectional_attention`): the encoder is in another
    file, which Baton does not read.
    """
    types = [*layer_types(keys, _PATTERN)[:-1], FULL]
    shared = keys.integer("attention.shared_kv_layers", 0, minimum=0)
    found: dict[str, Any] = {
        **_gguf_heads(keys, types, shared),
        **_gguf_mlp(keys, shared),
        **_gguf_per_layer(keys),
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "sliding_window": keys.integer("attention.sliding_window"),
    }
    if keys.get("final_logit_softcapping") is not None:
        found["final_logit_softcapping"] = keys.decimal("final_logit_softcapping")
    if keys.get("expert_count"):
        found["enable_moe_block"] = True
        found["num_experts"] = keys.integer("expert_count")
        found["top_k_experts"] = keys.integer("expert_used_count")
        found["moe_intermediate_size"] = expert_size(keys)
    return found


def _gguf_heads(keys: Keys, types: Sequence[str], shared: int) -> Mapping[str, Any]:
    """Return the fields of heads and RoPE, which differ between the two types of layers."""
    full_size, size = (_gguf_head_dim(keys, suffix) for suffix in ("", "_swa"))
    kv_heads = keys.layer_integers("attention.head_count_kv")
    by_type: dict[str, int] = dict(zip(types, kv_heads, strict=True))
    if any(by_type[kind] != number for kind, number in zip(types, kv_heads, strict=True)):
        raise keys.wrong("attention.head_count_kv", f"layers of one type differ: {kv_heads}")
    own = [i for i, kind in enumerate(types[: len(types) - shared]) if kind == FULL]
    of_full = {"head_dim": full_size, "num_key_value_heads": by_type[FULL]}
    return {
        "head_dim": size,
        "num_key_value_heads": by_type.get(SLIDING, by_type[FULL]),
        "per_layer_config": {str(i): of_full for i, kind in enumerate(types) if kind == FULL},
        "attention_k_eq_v": not any(keys.has("attn_v.weight", layer) for layer in own),
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _gguf_rotated_share(keys, full_size // 2),
                "rope_theta": keys.decimal("rope.freq_base", DEFAULT_THETA),
            },
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.decimal("rope.freq_base_swa", DEFAULT_THETA),
            },
        },
    }


def _gguf_head_dim(keys: Keys, suffix: str) -> int:
    """Return the head size of one type of layer; raises ModelLoadError for unequal sizes.

    Args:
        keys: metadata of the GGUF file.
        suffix: ending of the keys' names: "_swa" for layers with a window, "" for the others.
    """
    size = keys.integer(f"attention.key_length{suffix}")
    for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        if (found := keys.integer(name, size)) != size:
            raise keys.wrong(name, f"must be the keys' length {size}, got {found}")
    return size


def _gguf_rotated_share(keys: Keys, num_pairs: int) -> float:
    """Return the share of a head's pairs that RoPE rotates in layers with full attention.

    Raises:
        ModelLoadError: RoPE is scaled, or the factors are not 1 for the first pairs and huge for
            the others.
    """
    if (kind := keys.get("rope.scaling.type")) not in (None, "none"):
        raise keys.wrong("rope.scaling.type", f"{kind!r:.100} is not supported")
    if ROPE_FACTORS not in keys.file.tensors:
        return 1.0
    factors = keys.file.floats(ROPE_FACTORS)
    num_rotated = sum(factor < _UNROTATED for factor in factors)
    if (
        len(factors) != num_pairs
        or factors[:num_rotated] != (1.0,) * num_rotated
        or not num_rotated
    ):
        problem = f"must be 1 for the first of {num_pairs} pairs, and at least {_UNROTATED:g} after"
        raise ModelLoadError(f"{keys.file.path}: {ROPE_FACTORS}: {problem}")
    return num_rotated / num_pairs


def _gguf_mlp(keys: Keys, shared: int) -> Mapping[str, Any]:
    """Return the fields of the MLPs, which may be twice as wide in the last ``shared`` layers."""
    name = "feed_forward_length"
    sizes = keys.layer_integers(name)
    is_double = shared > 0 and sizes[-1] == 2 * sizes[0]
    own, last = len(sizes) - shared, sizes[0] * (2 if is_double else 1)
    if sizes != [sizes[0]] * own + [last] * shared:
        raise keys.wrong(name, f"{sizes} is not supported; the last {shared} layers may have twice")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": is_double}


def _gguf_per_layer(keys: Keys) -> Mapping[str, Any]:
    """Return the fields of the vectors that each token has for each layer."""
    size = keys.integer("embedding_length_per_layer_input", 0, minimum=0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    table = keys.file.tensors.get(_PER_LAYER_TABLE)
    if table is None:
        raise ModelLoadError(f"{keys.file.path}: weights are missing: {_PER_LAYER_TABLE}")
    return {
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": table.shape[0],
        "pad_token_id": keys.file.metadata.get("tokenizer.ggml.padding_token_id", 0),
    }


GGUF = {
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        _gguf_fields,
        heads=no_fields,
        outer={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_exps": "experts.{expert}.gate_proj",
            "ffn_up_exps": "experts.{expert}.up_proj",
            "ffn_down_exps": "experts.{expert}.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
        },
        may_have_experts=True,
    )
}
