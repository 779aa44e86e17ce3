"""GGUF architectures with recurrent layers, which carry a state instead of attention.

Knows no tensor's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import (
    Architecture,
    Change,
    Keys,
    Names,
    partly_turning_heads,
    whole_heads,
)
from baton.checkpoint.gguf.dense import PAIRS, granite_scales
from baton.checkpoint.gguf.experts import (
    GRANITE_JOINS,
    GRANITE_NAMES,
    SHARED_EXPERT,
    deepseek_experts,
    granite_experts,
    qwen_experts,
    qwen_shared,
    turns,
)

# Tensors that tell kinds of layers apart.
_MAMBA2, _DELTA_NET, _ATTENTION = "ssm_in.weight", "ssm_a", "attn_q.weight"
_EXPERTS, _MLP = "ffn_gate_inp.weight", "ffn_up.weight"
_BAMBA_TURNING = 0.5  # rotated share of a head


def _kinds(keys: Keys, recurrent: str, names: tuple[str, str]) -> list[str]:
    """Return each layer's kind.

    Args:
        keys: the file's metadata.
        recurrent: a tensor that only recurrent layers have.
        names: kind of recurrent layers, kind of all others.
    """
    with_state = set(keys.layers_with(recurrent))
    return [names[layer not in with_state] for layer in range(keys.num_layers())]


# --------------------------------------------------------------------------- gated delta nets


def _delta_nets(keys: Keys) -> Mapping[str, Any]:
    num_value_heads, inner_size = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner_size % num_value_heads:
        problem = f"{num_value_heads} heads do not divide ssm.inner_size {inner_size}"
        raise keys.wrong("ssm.time_step_rank", problem)
    return {
        "layer_types": _kinds(keys, _DELTA_NET, ("linear_attention", "full_attention")),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_value_head_dim": inner_size // num_value_heads,
    }


def _qwen3next(keys: Keys) -> Mapping[str, Any]:
    experts = {**qwen_experts(keys, normalized=True), **qwen_shared(keys)}
    return {**_delta_nets(keys), **experts}


_DELTA_NET_NAMES: Names = {
    **SHARED_EXPERT,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "output_norm")
_DELTA_NET_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **dict.fromkeys(_NORMS, (Change.LESS_ONE,)),
    "ffn_gate_inp_shexp": (Change.ONE_ROW,),
    "ssm_a": (Change.LOG_OF_DECAY,),
    "ssm_conv1d": (Change.CHANNELS,),
}
_IN_PROJ = "linear_attn.in_proj_qkvz.weight"
_QWEN3_5_NAMES: Names = {
    **_DELTA_NET_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_VALUES = (Change.VALUE_HEADS,)
_QWEN3_5_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **_DELTA_NET_CHANGES,
    **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"), _VALUES),
    "attn_qkv": (Change.VALUE_CHANNELS,),
    "ssm_a": (Change.VALUE_HEADS, Change.LOG_OF_DECAY),
    "ssm_conv1d": (Change.VALUE_CHANNELS, Change.CHANNELS),
    "ssm_out": (Change.VALUE_COLUMNS,),
}


def _qwen3_5(model: str, fields: Any) -> Architecture:
    return Architecture(
        model,
        fields,
        heads=partly_turning_heads,
        names=_QWEN3_5_NAMES,
        changes=_QWEN3_5_CHANGES,
    )


# ----------------------------------------------------------------------------------- Mamba 2


def _mamba2(keys: Keys) -> Mapping[str, Any]:
    """Return the mixer fields of Granite 4 and Bamba."""
    hidden_size, inner_size = keys.integer("embedding_length"), keys.integer("ssm.inner_size")
    if inner_size % hidden_size:
        problem = f"must be a multiple of embedding_length {hidden_size}, got {inner_size}"
        raise keys.wrong("ssm.inner_size", problem)
    with_state = keys.layers_with(_MAMBA2)
    first = with_state[0] if with_state else 0
    return {
        "mamba_expand": inner_size // hidden_size,
        "mamba_n_heads": keys.integer("ssm.time_step_rank"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has("ssm_conv1d.bias", first),
        "mamba_proj_bias": keys.has("ssm_in.bias", first),
        "attention_bias": bool(keys.layers_with("attn_q.bias")),
    }


def _granite_hybrid(keys: Keys) -> Mapping[str, Any]:
    return {
        **_mamba2(keys),
        **granite_scales(keys),
        **granite_experts(keys),
        "layer_types": _kinds(keys, _MAMBA2, ("mamba", "attention")),
        "position_embedding_type": "rope" if turns(keys) else "nope",
    }


def _of_granite_hybrid(keys: Keys) -> Architecture | None:
    """Choose Bamba, whose files say granitehybrid but have RoPE and no scales."""
    is_bamba = turns(keys) and keys.get("embedding_scale") is None
    return _BAMBA if is_bamba else None


def _bamba(keys: Keys) -> Mapping[str, Any]:
    attending = set(range(keys.num_layers())) - set(keys.layers_with(_MAMBA2))
    return {**_mamba2(keys), "attn_layer_indices": sorted(attending)}


def _bamba_heads(keys: Keys) -> Mapping[str, Any]:
    """Return the head size, half of which RoPE rotates; raises ModelLoadError otherwise."""
    found = partly_turning_heads(keys)
    turning = found["partial_rotary_factor"]
    if keys.get("rope.dimension_count") is not None and turning != _BAMBA_TURNING:
        problem = f"must be half of {found['head_dim']}, got {keys.get('rope.dimension_count')}"
        raise keys.wrong("rope.dimension_count", problem)
    return {"head_dim": found["head_dim"]}


def _mixer(name: str) -> Names:
    """Return the names of Mamba 2's mixer tensors, with this prefix."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


_MAMBA2_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **PAIRS,
    "ssm_a": (Change.FLAT, Change.LOG_OF_DECAY),
    "ssm_d": (Change.FLAT,),
    "ssm_norm": (Change.FLAT,),
    "ssm_conv1d.weight": (Change.CHANNELS,),
}
_BAMBA = Architecture(
    "BambaForCausalLM",
    _bamba,
    heads=_bamba_heads,
    outer={"output_norm": "model.final_layernorm"},
    names={
        **_mixer("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    changes=_MAMBA2_CHANGES,
)


def _nemotron(keys: Keys) -> Mapping[str, Any]:
    """Return Nemotron-H's fields; each of its layers has one part."""
    kinds = {
        **dict.fromkeys(keys.layers_with(_MLP), "mlp"),
        **dict.fromkeys(keys.layers_with(_EXPERTS), "moe"),
        **dict.fromkeys(keys.layers_with(_MAMBA2), "mamba"),
        **dict.fromkeys(keys.layers_with(_ATTENTION), "attention"),
    }
    layers = range(keys.num_layers())
    if missing := [layer for layer in layers if layer not in kinds]:
        problem = f"blk.{missing[0]} has neither attention nor a state, a MLP or experts"
        raise keys.wrong("block_count", problem)
    num_heads, inner_size = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner_size % num_heads:
        problem = f"{num_heads} heads do not divide ssm.inner_size {inner_size}"
        raise keys.wrong("ssm.time_step_rank", problem)
    eps = keys.decimal("attention.layer_norm_rms_epsilon")
    return {
        "layers_block_type": [kinds[layer] for layer in layers],
        "layer_norm_epsilon": eps,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner_size // num_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": bool(keys.layers_with("ssm_conv1d.bias")),
        "use_bias": bool(keys.layers_with("ssm_in.bias")),
        "attention_bias": bool(keys.layers_with("attn_q.bias")),
        "mlp_bias": bool(keys.layers_with("ffn_up.bias")),
        "mlp_hidden_act": "relu2",
        **(_nemotron_experts(keys) if keys.get("expert_count") else {}),
    }


def _nemotron_experts(keys: Keys) -> Mapping[str, Any]:
    found = {**deepseek_experts(keys)}
    found["norm_topk_prob"] = keys.boolean("expert_weights_norm", True)
    found["moe_shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    has_latents = keys.get("moe_latent_size") is not None
    found["moe_latent_size"] = keys.integer("moe_latent_size") if has_latents else None
    return found


_NEMOTRON_NAMES: Names = {
    **_mixer("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON = Architecture(
    "NemotronHForCausalLM",
    _nemotron,
    heads=whole_heads,
    prefix="backbone.layers.{layer}.",
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    names=_NEMOTRON_NAMES,
    changes=_MAMBA2_CHANGES,
)


# ------------------------------------------------------------------------- short convolutions


def _lfm2(keys: Keys) -> Mapping[str, Any]:
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": bool(keys.layers_with("shortconv.conv.bias")),
        "layer_types": _kinds(keys, "shortconv.conv.weight", ("conv", "full_attention")),
        "norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
    }


HYBRIDS: Mapping[str, Architecture] = {
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        names={**_mixer("mamba"), **GRANITE_NAMES},
        joins=GRANITE_JOINS,
        changes=_MAMBA2_CHANGES,
        variant=_of_granite_hybrid,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _lfm2,
        outer={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
        names={
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        changes={"shortconv.conv.weight": (Change.CHANNELS,)},
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _qwen3_5("Qwen3_5ForCausalLM", _delta_nets),
    "qwen35moe": _qwen3_5("Qwen3_5MoeForCausalLM", _qwen3next),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _qwen3next,
        heads=partly_turning_heads,
        names={
            **_DELTA_NET_NAMES,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",
        },
        joins=((_IN_PROJ, ("attn_qkv.weight", "attn_gate.weight")),),
        changes={**_DELTA_NET_CHANGES, _IN_PROJ: (Change.BY_KEY_HEAD,)},
    ),
}
