"""The rows of families with layers that carry states; see family_checkpoints.py.

Refuses to know: what is asserted.
"""

from __future__ import annotations

from typing import Any

from tests.numerics.family import Family

# States that fit into a block of two tokens: those of real models take hundreds.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 3,
    "mamba_n_groups": 2,
    "mamba_expand": 1,
    "head_dim": 32,
}
GRANITE: dict[str, Any] = {
    **MAMBA,
    "initializer_range": 0.5,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
    "embedding_multiplier": 0.7,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}


def mamba_layers(pattern: str) -> dict[str, Any]:
    """A layer per letter: m has Mamba 2, f full attention."""
    names = {"m": "linear_attention", "f": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [names[letter] for letter in pattern],
    }


NEMOTRON: dict[str, Any] = {
    "initializer_range": 0.4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 3,
    "head_dim": 32,
    "intermediate_size": 40,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
}


DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 32,
    "initializer_range": 0.25,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}


def delta_nets(pattern: str) -> dict[str, Any]:
    """A layer per letter: d has a gated delta net, f full attention."""
    names = {"d": "linear_attention", "f": "full_attention"}
    return {
        **DELTA_NET,
        "num_hidden_layers": len(pattern),
        "layer_types": [names[letter] for letter in pattern],
    }


# Their fields with other names than elsewhere.
LFM2 = {"block_multiple_of": 8, "norm_eps": 1e-6}

HYBRIDS: dict[str, Family] = {
    "BambaForCausalLM": Family(
        {
            "plain": MAMBA | {"attn_layer_indices": [1]},
            "every bias, one group": MAMBA
            | {
                "num_hidden_layers": 4,
                "attn_layer_indices": [0, 2],
                "mamba_n_groups": 1,
                "mamba_proj_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
            },
        },
        refused={
            "time_step_limit": [0.1, 2.0],
            "attn_layer_indices": 7,
            "mamba_d_head": 9,
            "mamba_n_heads": 7,
        },
    ),
    "Lfm2ForCausalLM": Family(
        {
            "one of each": LFM2 | {"layer_types": ["conv", "full_attention"]},
            "biases, untied": LFM2
            | {
                "conv_bias": True,
                "conv_L_cache": 4,
                "tie_word_embeddings": False,
                "num_hidden_layers": 5,
                "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            },
        },
        refused={"conv_L_cache": 1, "block_multiple_of": 0},
    ),
    "GraniteMoeHybridForCausalLM": Family(
        {
            "no experts, rope": GRANITE
            | {"num_local_experts": 0, "position_embedding_type": "rope"}
            | mamba_layers("mf"),
            "experts, biases": GRANITE
            | mamba_layers("mfmmf")
            | {
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "mamba_n_groups": 1,
                "mamba_proj_bias": True,
                "attention_bias": True,
                "initializer_range": 0.4,
            },
        },
        {
            "position_embedding_type": "alibi",
            "time_step_limit": [0.1, 2.0],
            "mamba_d_head": 9,
            "final_logit_softcapping": 5.0,
        },
    ),
    "NemotronHForCausalLM": Family(
        {
            "plain": NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
            "experts over latents, some layers of one part": NEMOTRON
            | {
                "layers_block_type": [
                    *("mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp", "attention")
                ],
                "moe_latent_size": 32,
                "initializer_range": 0.3,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "use_bias": True,
            },
        },
        {
            "mlp_hidden_act": "silu",
            "mamba_hidden_act": "gelu",
            "time_step_limit": [0.1, 2.0],
            "residual_in_fp32": True,
            "n_groups": 3,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        {
            "plain": delta_nets("df"),
            "dense layers, biases, weights as they come": delta_nets("fddfd")
            | {
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "initializer_range": 0.15,
                "attention_bias": True,
                "linear_num_key_heads": 2,
            },
        },
        {"linear_num_key_heads": 3, "attn_output_gate": False},
    ),
    "Qwen3_5ForCausalLM": Family(
        {
            "plain": delta_nets("df"),
            "tied": delta_nets("dddfd") | {"tie_word_embeddings": True, "initializer_range": 0.2},
        },
        {"linear_num_key_heads": 3, "attn_output_gate": False},
    ),
    "Qwen3_5ForConditionalGeneration": Family(
        {"plain": delta_nets("df"), "biases": delta_nets("dddfd") | {"attention_bias": True}},
        {"linear_num_key_heads": 3, "attn_output_gate": False},
    ),
    "Qwen3_5MoeForCausalLM": Family(
        {"plain": delta_nets("df"), "more experts": delta_nets("dfd") | {"num_experts": 8}},
        {"linear_num_key_heads": 3, "norm_topk_prob": False},
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        {"plain": delta_nets("df"), "more experts": delta_nets("dfd") | {"num_experts": 8}},
        {"linear_num_key_heads": 3, "norm_topk_prob": False},
    ),
}
