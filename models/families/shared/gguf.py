"""Metadata keys, tensor names and converters' changes in GGUF files of several families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.checkpoint.gguf.architecture import Change, Keys, Names
from models.model_fields import FULL, SLIDING

# RoPE rotates pairs of rows. GGUF keeps Llama's original order, in which the two rows of a pair are
# adjacent. Hugging Face stores, for each head, the first rows of all pairs, then the second rows.
PAIRS = {"attn_q": (Change.QUERY_HALVES,), "attn_k": (Change.KEY_HALVES,)}
EXPERTS = ("ffn_up_exps.weight", "ffn_gate_up_exps.weight")
# GGUF name -> checkpoint name of shared experts and score biases, for models with `routed_experts`.
ROUTED_EXPERTS: Names = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
MAMBA2 = "ssm_in.weight"  # a tensor that only Mamba 2's layers have
MAMBA2_CHANGES: Mapping[str, tuple[Change, ...]] = {
    **PAIRS,
    "ssm_a": (Change.FLAT, Change.LOG_OF_DECAY),
    "ssm_d": (Change.FLAT,),
    "ssm_norm": (Change.FLAT,),
    "ssm_conv1d.weight": (Change.CHANNELS,),
}


def window(keys: Keys) -> Mapping[str, Any]:
    """Return the field ``sliding_window``: None if the file has no window, or a window of 0."""
    return {"sliding_window": keys.integer("attention.sliding_window", 0, minimum=0) or None}


def layer_types(keys: Keys, interval: int) -> list[str]:
    """Return each layer's type: attention in a sliding window, or full attention.

    Args:
        keys: metadata of the GGUF file.
        interval: without a pattern in the file, every ``interval``-th layer has full attention.

    Raises:
        ModelLoadError: the pattern is neither a number nor a list with one value per layer.
    """
    layers, name = range(keys.num_layers()), "attention.sliding_window_pattern"
    pattern = keys.get(name, interval)
    if isinstance(pattern, list):
        if len(pattern) < len(layers):
            raise keys.wrong(name, f"{len(pattern)} entries for {len(layers)} layers")
        return [SLIDING if pattern[layer] else FULL for layer in layers]
    interval = keys.integer(name, interval)
    return [SLIDING if (layer + 1) % interval else FULL for layer in layers]


def kinds(keys: Keys, recurrent: str, names: tuple[str, str]) -> list[str]:
    """Return the name of each layer's kind: recurrent or other.

    Args:
        keys: metadata of the GGUF file.
        recurrent: name of a tensor that only recurrent layers have.
        names: name of the kind of recurrent layers, and of all other layers.
    """
    with_state = set(keys.layers_with(recurrent))
    return [names[layer not in with_state] for layer in range(keys.num_layers())]


def state_heads(keys: Keys) -> tuple[int, int]:
    """Return the number of heads of a recurrent state, and the size of a head.

    Raises:
        ModelLoadError: the heads do not divide the inner size.
    """
    num_heads, inner_size = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner_size % num_heads:
        problem = f"{num_heads} heads do not divide ssm.inner_size {inner_size}"
        raise keys.wrong("ssm.time_step_rank", problem)
    return num_heads, inner_size // num_heads


def expert_size(keys: Keys) -> int:
    """Return an expert's intermediate size; in old files, only tensor shapes tell this size."""
    if keys.get("expert_feed_forward_length") is not None:
        return keys.integer("expert_feed_forward_length")
    return keys.rows("ffn_up_exps.weight")


def routed_experts(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json fields that `shared.experts.routed_experts` reads."""
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "n_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "routed_scaling_factor": keys.decimal("expert_weights_scale", 1.0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def mamba2(keys: Keys) -> Mapping[str, Any]:
    """Return the config.json fields ``mamba_...`` of a model with Mamba 2 layers."""
    hidden_size, inner_size = keys.integer("embedding_length"), keys.integer("ssm.inner_size")
    if inner_size % hidden_size:
        problem = f"must be a multiple of embedding_length {hidden_size}, got {inner_size}"
        raise keys.wrong("ssm.inner_size", problem)
    with_state = keys.layers_with(MAMBA2)
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


def mamba2_names(name: str) -> Names:
    """Return the checkpoint names of Mamba 2's tensors, by GGUF name, in a mixer ``name``."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }
