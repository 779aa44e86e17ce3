"""Tiny random models made by transformers' own classes, and a paged runner for ours.

Refuses to know: what is asserted about either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from baton_kernels.attention import ATTENTION_BACKENDS
from models.base import CausalLM
from tests.numerics.paged import make_cache, make_context, make_metadata, make_tables

BLOCK_SIZE = 4
# What of an architecture a model of two layers is to have, for every weight to matter.
OF_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "Gemma3ForCausalLM": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma3ForConditionalGeneration": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "Olmo3ForCausalLM": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi3ForCausalLM": {
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
}


def make_hugging_face_model(architecture: str, **overrides: Any) -> Any:
    """Make a random two-layer model in which each weight matters (no zero bias or unit norm)."""
    model_class = getattr(transformers, architecture)
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "sliding_window": None,
        "eos_token_id": [1, 2],
        # Of models with experts; panels of native kernels are 8 to 32 wide.
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    torch.manual_seed(0)
    shape |= OF_ARCHITECTURES.get(architecture, {})
    model = model_class(_config(model_class.config_class, shape | overrides)).eval()
    fill_small_weights(model)
    return model


def fill_small_weights(model: Any) -> None:
    """Draw biases and norms, which transformers sets to 0 and 1, and decays that keep state."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.2, 1.5)
        if name.endswith(("router.scale", "router.per_expert_scale")):
            torch.nn.init.uniform_(parameter, 0.3, 1.5)
        if name.endswith("linear_attn.A_log"):  # or nothing is kept for longer than a token
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of a router
            buffer.uniform_(0.0, 0.3)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.2)


def _config(config_class: Any, values: dict[str, Any]) -> Any:
    """A config; of a model that sees images, too, with these values of its text."""
    if "text_config" not in getattr(config_class, "sub_configs", {}):
        return config_class(**values)
    vision = _vision_values(config_class, values["hidden_size"])
    implementation = {"attn_implementation": values["attn_implementation"]}
    tied = {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
    if config_class.__name__ in ("LlavaConfig", "Mistral3Config"):
        values = {"model_type": "mistral", **values}
    return config_class(text_config=values, vision_config=vision, **implementation, **tied)


def _vision_values(config_class: Any, text_size: int) -> dict[str, Any]:
    """Return fields of the part that sees images, by the names that a family has for them."""
    name = config_class.__name__
    if name in ("Idefics3Config", "SmolVLMConfig"):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 8}
        return {"num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    if name in ("Gemma3Config", "LlavaConfig", "Mistral3Config"):
        kind = "siglip_vision_model" if name == "Gemma3Config" else "pixtral"
        sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 8}
        return {"model_type": kind, "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    if name == "Gemma4Config":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "patch_size": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return {"num_hidden_layers": 1, "position_embedding_size": 64, **sizes, **heads}
    if name == "Qwen2VLConfig":
        return {"depth": 1, "embed_dim": 16, "hidden_size": text_size, "num_heads": 2}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_heads": 2, "out_hidden_size": text_size, "num_position_embeddings": 16}
    if name == "Qwen3VLConfig":
        vision |= {"deepstack_visual_indexes": [0]}
    return vision


def save(model: Any, folder: Path, **options: Any) -> Path:
    """``save_pretrained`` without its progress bar."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


@torch.inference_mode()
def hugging_face_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """``[num_tokens, vocab_size]`` of the whole sequence in one forward pass."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def paged_logits(
    model: CausalLM,
    token_ids: Sequence[int],
    chunks: Sequence[int] | None = None,
    backend_name: str = "cpu",
    after_layer: Callable[[int], None] | None = None,
) -> Tensor:
    """``[num_tokens, vocab_size]``, computed in steps of the given sizes over a paged cache."""
    config, backend = model.config, ATTENTION_BACKENDS.load(backend_name)()
    table = make_tables([len(token_ids)], BLOCK_SIZE, num_blocks=40)
    cache = make_cache(40, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    cache = cache.to(getattr(torch, config.dtype))  # loaded in the checkpoint's own dtype
    logits, done = [], 0
    for size in chunks or [len(token_ids)]:
        metadata = make_metadata([size], [done + size], table, BLOCK_SIZE)
        backend.plan(metadata)
        positions = torch.arange(done, done + size)
        context = make_context(positions, metadata, backend, cache, after_layer)
        hidden = model.forward(torch.tensor(token_ids[done : done + size]), context)
        logits.append(model.compute_logits(hidden).float())
        done += size
    assert done == len(token_ids)
    return torch.cat(logits)
