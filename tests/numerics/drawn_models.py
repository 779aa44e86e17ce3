"""Draw models of every family with random shapes: odd sizes wherever a config allows them.

Refuses to know: what is asserted.
"""

from __future__ import annotations

import copy
import random
from typing import Any

from tests.numerics.family_checkpoints import FAMILIES

_KINDS_OF_LAYERS = ("sliding_attention", "full_attention")
_HALF_TURNS = ("Bamba", "Glm", "Phi3", "Qwen3Next", "Qwen3_5")  # half of a head turns, in pairs
_WIDTH_OF_HEADS = (
    "Lfm2",
    "Phi3",
    "Qwen2VL",
    "Qwen2_5_VL",
)  # a head has hidden_size / num_attention_heads dims
_WHOLE_HEADS = ("Cwm", "DeepseekV2", "Gemma", "Llama")  # heads divide hidden_size


def draw_fields(architecture: str, draw: random.Random) -> dict[str, Any]:
    """Draw a variant of a family and its sizes; returns fields for `make_hugging_face_model`."""
    variants = FAMILIES[architecture].variants
    fields = copy.deepcopy(dict(variants[draw.choice(sorted(variants))]))
    fields |= {"attn_implementation": "eager"} | _sizes(architecture, draw)
    if "kv_lora_rank" in fields:
        fields = {"n_group": 1, "topk_group": 1} | fields | _latents(fields, draw)
    fields |= _experts(fields, draw)
    if "mamba_expand" in fields:
        fields |= _mamba(fields, draw)
    if "mamba_num_heads" in fields:
        fields |= _nemotron(fields, draw)
    if "linear_num_key_heads" in fields:
        fields |= _delta_nets(draw)
    if fields.get("sliding_window"):
        fields["sliding_window"] = draw.randint(3, 40)
    if "global_head_dim" in fields:
        fields["global_head_dim"] = draw.randrange(8, 50, 2)
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    if "num_kv_shared_layers" in fields:  # both kinds have layers with keys and values
        return fields
    if set(fields.get("layer_types", ())) == set(_KINDS_OF_LAYERS):
        rest = draw.choices(_KINDS_OF_LAYERS, k=draw.randint(0, 3))
        fields["layer_types"] = draw.sample([*_KINDS_OF_LAYERS, *rest], len(rest) + 2)
        fields["num_hidden_layers"] = len(rest) + 2
    return fields


def _sizes(architecture: str, draw: random.Random) -> dict[str, Any]:
    num_kv_heads = draw.choice([1, 2, 3])
    num_heads = num_kv_heads * draw.choice([1, 2, 3, 5, 8])
    step = 4 if architecture.startswith(_HALF_TURNS) else 2
    head_dim = draw.randrange(8, 50, step)
    hidden_size = draw.randint(17, 90)
    sizes: dict[str, Any] = {}
    if architecture.startswith(_WIDTH_OF_HEADS):
        hidden_size = num_heads * head_dim
    if architecture.startswith(_WHOLE_HEADS):
        hidden_size = num_heads * draw.randint(-(-17 // num_heads), 90 // num_heads)
    if architecture == "Phi3ForCausalLM":
        rotary = head_dim // 4
        sizes["rope_parameters"] = draw.choice(
            [
                {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                {
                    "rope_type": "longrope",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                    "short_factor": [1.0 + 0.1 * i for i in range(rotary)],
                    "long_factor": [2.0 + 0.1 * i for i in range(rotary)],
                },
            ]
        )
        sizes["original_max_position_embeddings"] = draw.choice([30, 256])
    return {
        **sizes,
        "vocab_size": draw.randint(40, 150),
        "hidden_size": hidden_size,
        "intermediate_size": draw.randint(9, 100),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _experts(fields: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Draw sizes that only families with experts read."""
    groups = fields.get("n_group") or 1
    num_experts = groups * draw.randint(2, 4) if groups > 1 else draw.randint(3, 9)
    if fields.get("num_local_experts") == 0:
        num_experts = 0
    counts = dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), num_experts)
    return {
        **counts,
        "num_experts_per_tok": draw.randint(1, 3),
        "moe_intermediate_size": draw.randint(5, 70),
        "shared_expert_intermediate_size": draw.randint(5, 70),
        "moe_shared_expert_intermediate_size": draw.randint(5, 70),
        "shared_intermediate_size": draw.randint(9, 100),
    }


def _latents(fields: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    rotary_dim = 2 * draw.randint(2, 16)
    return {
        "head_dim": rotary_dim,  # the name that transformers' rotary embedding reads
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": None if fields["q_lora_rank"] is None else draw.randint(5, 60),
        "kv_lora_rank": draw.randint(5, 70),
        "qk_nope_head_dim": draw.randint(3, 40),
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": draw.randint(3, 70),
    }


def _mamba(fields: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    num_groups, each, head_dim = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.randint(3, 17)
    num_heads = num_groups * each
    return {
        "hidden_size": num_heads * head_dim,
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": num_groups,
        "mamba_d_state": draw.randint(2, 20),
        "mamba_d_conv": draw.randint(2, 5),
    }


def _nemotron(fields: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    num_groups = draw.choice([1, 2, 3])
    sizes = {
        "mamba_num_heads": num_groups * draw.choice([1, 2, 3]),
        "mamba_head_dim": draw.randint(3, 17),
        "n_groups": num_groups,
        "ssm_state_size": draw.randint(2, 20),
        "conv_kernel": draw.randint(2, 5),
    }
    if "moe_latent_size" in fields:
        sizes["moe_latent_size"] = draw.randint(9, 60)
    return sizes


def _delta_nets(draw: random.Random) -> dict[str, Any]:
    num_key_heads = draw.choice([1, 2, 3])
    return {
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.randint(3, 20),
        "linear_value_head_dim": draw.randint(3, 20),
        "linear_conv_kernel_dim": draw.randint(2, 5),
    }
