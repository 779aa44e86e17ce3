"""The tiny checkpoint of every architecture, made by transformers, which is also its reference.

A registered architecture without a row in FAMILIES fails tests/numerics/test_families.py.
Refuses to know: what is asserted about ours.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.api.sampling_params import SamplingParams
from engine import LLM
from models.registry import MODELS
from tests.numerics.family import Family
from tests.numerics.family_gemma4 import GEMMA4
from tests.numerics.family_hybrids import HYBRIDS
from tests.numerics.tiny_models import hugging_face_logits, make_hugging_face_model, save

VOCAB_SIZE = 61
MAX_MODEL_LEN = 256
WINDOW = 12  # shorter than every prompt that is cut in chunks
# Float noise between two ways to sum is about 1e-5 of a logit; a token is certain beyond this.
CLEAR_CUT = 1e-3
NUM_DIFFERENT = 4  # tokens that an output has at least: one that repeats a token shows nothing

NUM_CANDIDATES = 16
NUM_SHARED_TOKENS = 24  # of the prompts' first ones
NUM_PROMPT_TOKENS = 40
NUM_OUTPUTS = 200


def layers(pattern: str) -> dict[str, Any]:
    """Return the fields of a model with one layer per letter: s has a window, f full attention."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {
        "num_hidden_layers": len(pattern),
        "layer_types": [names[letter] for letter in pattern],
        "sliding_window": WINDOW,
    }


DEEPSEEK_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 8),
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
LATENTS: dict[str, Any] = {
    "initializer_range": 0.35,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    **DEEPSEEK_EXPERTS,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
# With larger embeddings, which Gemma scales up, a tied model repeats its last token.
SMALL = {"initializer_range": 0.1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "factor": 2.0,
    "short_factor": [1.0, 1.2],
    "long_factor": [2.0, 3.0],
}


def ropes(full: dict[str, Any], sliding_theta: float) -> dict[str, Any]:
    """RoPEs of layers with full attention, and of those with a window."""
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


# Where an image has three positions; a token of text has one.
THREE_AXES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 2]}
}
FAMILIES: dict[str, Family] = {
    **HYBRIDS,
    **GEMMA4,
    "CwmForCausalLM": Family(
        {"plain": layers("ff"), "windows 3:1": layers("fsss") | {"mlp_bias": True}},
        refused={"sliding_window": None},
    ),
    "Gemma2ForCausalLM": Family(
        {
            "plain": {"sliding_window": WINDOW, **SMALL},
            "windows 1:1, biases": {
                "initializer_range": 0.2,
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
        },
        {"use_bidirectional_attention": True},
    ),
    "Gemma3ForCausalLM": Family(
        {
            "plain": SMALL,
            "windows 2:1, two RoPEs, a soft cap": {
                **SMALL,
                **layers("ssfssf"),
                **ropes({"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0}, 100.0),
                "final_logit_softcapping": 4.0,
            },
        },
        {"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0},
    ),
    "Gemma3ForConditionalGeneration": Family(
        {
            "plain": {"initializer_range": 0.2},
            "windows 2:1, two RoPEs, tied": {
                **SMALL,
                **layers("ssfssf"),
                **ropes({"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0}, 100.0),
                "tie_word_embeddings": True,
            },
        },
        {"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0},
    ),
    "GlmForCausalLM": Family(
        {"plain": {}, "no biases": {"attention_bias": False}},
        {"rope_parameters.partial_rotary_factor": 0.1},
    ),
    "Glm4ForCausalLM": Family(
        {"plain": {"num_key_value_heads": 4}, "other heads": {"num_key_value_heads": 1}},
        {"rope_parameters.partial_rotary_factor": 0.1},
    ),
    "Glm4MoeForCausalLM": Family(
        {
            "plain": DEEPSEEK_EXPERTS,
            "groups, norms of heads, biases": DEEPSEEK_EXPERTS
            | {
                "initializer_range": 0.35,
                "num_hidden_layers": 3,
                "attention_bias": True,
                "use_qk_norm": True,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
            },
        },
        {
            "moe_layer_freq": 2,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "rope_parameters.partial_rotary_factor": 0.1,
        },
    ),
    "GptOssForCausalLM": Family(
        {
            "plain": layers("ff") | {"intermediate_size": 64, "initializer_range": 0.3},
            "windows 1:1, YaRN": layers("sfsf")
            | {
                "initializer_range": 0.3,
                "intermediate_size": 64,
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "rope_parameters": _YARN | {"truncate": False},
            },
        },
        {"swiglu_alpha": 1.5, "swiglu_limit": 5.0, "sliding_window": None},
    ),
    "GraniteForCausalLM": Family(
        {"plain": {}, "every bias": {"attention_bias": True, "mlp_bias": True}},
        {"final_logit_softcapping": 5.0},
    ),
    "Olmo2ForCausalLM": Family({"plain": {}, "other heads": {"num_key_value_heads": 1}}),
    "Olmo3ForCausalLM": Family(
        {"plain": {}, "windows 3:1, YaRN": layers("sssfs") | ropes(_YARN, 50_000.0)}
    ),
    "Phi3ForCausalLM": Family(
        {
            "plain": {"sliding_window": None, "rope_parameters": None},
            "partial RoPE, window": {"sliding_window": WINDOW},
            "LongRoPE": {
                "rope_parameters": _LONGROPE,
                "original_max_position_embeddings": MAX_MODEL_LEN,
            },
        },
        {"rope_parameters.partial_rotary_factor": 0.1},
    ),
    "SmolLM3ForCausalLM": Family(
        {
            "plain": {"num_hidden_layers": 5, "no_rope_layers": None},
            "windows": {
                "num_hidden_layers": 5,
                "no_rope_layers": [1, 0, 1, 1, 0],
                "use_sliding_window": True,
                "sliding_window": WINDOW,
            },
        }
    ),
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        Family(
            {
                "plain": {},
                "biases": {"attention_bias": True, "mlp_bias": True},
            }
        ),
    ),
    "LlamaForCausalLM": Family(
        {
            "plain": {},
            "every bias, tied": {
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        }
    ),
    "MinistralForCausalLM": Family(
        {"plain": layers("ff"), "windows 1:3": layers("fsff")},
        refused={"sliding_window": None},
    ),
    "DeepseekV2ForCausalLM": Family(
        {
            "queries at once, no groups": LATENTS
            | {
                "num_hidden_layers": 3,
                "q_lora_rank": None,
                "topk_method": "greedy",
            },
            "groups, YaRN": LATENTS
            | {
                "num_hidden_layers": 3,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "rope_parameters": YARN,
            },
        },
        refused={"moe_layer_freq": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "DeepseekV3ForCausalLM": Family(
        {
            "no experts": LATENTS | {"first_k_dense_replace": 2},
            "halves turn, biases": LATENTS
            | {
                "num_hidden_layers": 3,
                "rope_interleave": False,
                "attention_bias": True,
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
            },
            "groups, YaRN": LATENTS
            | {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
        },
        refused={"moe_layer_freq": 2, "scoring_func": "softmax", "topk_method": "greedy"},
    ),
    "LlavaForConditionalGeneration": Family({"plain": {}}),
    "MistralForCausalLM": Family({"plain": {}, "window": {"sliding_window": WINDOW}}),
    "Mistral3ForConditionalGeneration": Family({"plain": {}, "window": {"sliding_window": WINDOW}}),
    "MixtralForCausalLM": Family(
        {
            "plain": {"intermediate_size": 64},
            "window": {"intermediate_size": 64, "sliding_window": WINDOW},
        }
    ),
    "Qwen2MoeForCausalLM": Family(
        {
            "plain": {},
            "windows, a dense layer": {
                "num_hidden_layers": 3,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
                "sliding_window": WINDOW,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
        }
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            "plain": {},
            "normalized, dense layers": {
                "num_hidden_layers": 4,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "decoder_sparse_step": 2,
                "norm_topk_prob": True,
            },
        }
    ),
    "Qwen2ForCausalLM": Family(
        {
            "plain": {},
            "windows 2:1": {
                "num_hidden_layers": 3,
                "sliding_window": WINDOW,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
        }
    ),
    "Qwen2VLForConditionalGeneration": Family(
        {"three axes": THREE_AXES, "other heads": THREE_AXES | {"num_key_value_heads": 1}}
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        {"three axes": THREE_AXES, "other heads": THREE_AXES | {"num_key_value_heads": 1}}
    ),
    "Qwen3VLForConditionalGeneration": Family(
        {
            "three axes": THREE_AXES,
            "biases": THREE_AXES | {"attention_bias": True, "num_hidden_layers": 3},
        }
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        {
            "three axes": THREE_AXES,
            "more experts": THREE_AXES | {"num_experts": 8, "num_experts_per_tok": 3},
        }
    ),
    "Qwen3ForCausalLM": Family(
        {
            "plain": {},
            "windows 1:1": layers("sfsf") | {"use_sliding_window": True},
            "empty places": layers("sfsssfsssfs") | {"use_sliding_window": True},
            "windows 5:1": layers("sssssf") | {"use_sliding_window": True, "intermediate_size": 44},
        }
    ),
    "SeedOssForCausalLM": Family(
        {
            "plain": {"attention_bias": True},
            "every bias": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
        }
    ),
}

# Of every architecture whose config has the field.
REFUSED: dict[str, Any] = {
    "hidden_act": "tanh",
    "hidden_activation": "tanh",
    "layer_types": "chunked_attention",  # Llama 4's, which nothing here computes
    "layers_block_type": "spiral_attention",
    "mlp_hidden_act": "tanh",
    "rope_parameters": {"rope_type": "spiral"},
}
# Of every architecture, whether its config has the field or not.
REFUSED_BY_ALL: dict[str, Any] = {"attention_chunk_size": 64}


def all_variants() -> list[tuple[str, str]]:
    """Architecture and variant of every tiny checkpoint; what has no row is not among them."""
    return [
        (architecture, variant)
        for architecture in MODELS.names()
        if architecture in FAMILIES
        for variant in FAMILIES[architecture].variants
    ]


def richest_variants() -> list[tuple[str, str]]:
    """The last variant of every family."""
    last = dict(all_variants())
    return list(last.items())


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its greedy output, each token of which transformers is certain of."""

    prompt: list[int]
    output: list[int]

    def later(self, num_tokens: int) -> Example:
        """Take the first tokens of the output for the end of the prompt."""
        return Example(self.prompt + self.output[:num_tokens], self.output[num_tokens:])


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A random model on disk, and the same model in transformers.

    Attributes:
        examples: they share their first NUM_SHARED_TOKENS tokens.
        short_examples: examples of few tokens, which leave room to grow.
        refused: see `Family`.
    """

    folder: Path
    theirs: Any
    examples: list[Example]
    short_examples: list[Example]
    refused: Mapping[str, Any]

    def logits(self, token_ids: list[int]) -> Tensor:
        """``[num_tokens, vocab_size]``, by transformers."""
        return hugging_face_logits(self.theirs, token_ids)

    def closer_logits(self, token_ids: list[int]) -> Tensor:
        """Return logits in float64 if transformers can; its float32 may differ by 1e-4."""
        closer = copy.deepcopy(self.theirs).double()
        closer.set_experts_implementation("eager")  # grouped products have no float64
        try:
            return hugging_face_logits(closer, token_ids)
        except RuntimeError:  # experts are computed in float32 alone
            return self.logits(token_ids)


def make_tiny_checkpoint(architecture: str, variant: str, folder: Path) -> TinyCheckpoint:
    """Make one of `all_variants` and its examples."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.5,
        "attn_implementation": "eager",
    }
    family = FAMILIES[architecture]
    theirs = make_hugging_face_model(architecture, **(shape | dict(family.variants[variant])))
    drafter = LLM(
        str(save(theirs, folder)),
        dtype="float32",
        kv_cache_bytes=2**26,
        max_num_requests=NUM_CANDIDATES,
    )
    return TinyCheckpoint(
        folder,
        theirs,
        _make_examples(theirs, drafter, 4, NUM_SHARED_TOKENS, NUM_PROMPT_TOKENS, NUM_OUTPUTS),
        _make_examples(theirs, drafter, 8, 3, 6, 40),
        family.refused if variant == list(family.variants)[-1] else {},
    )


@torch.inference_mode()
def _make_examples(
    theirs: Any,
    drafter: LLM,
    num_examples: int,
    num_shared: int,
    num_tokens: int,
    num_outputs: int,
) -> list[Example]:
    """Draw prompts; keep prompts whose output tokens have clear leads and vary.

    Baton drafts the outputs, because it is faster than transformers. One pass of transformers over
    prompts and drafts then gives the right token at each place.
    """
    draw = random.Random(num_tokens)
    shared = draw.choices(range(VOCAB_SIZE), k=num_shared)
    prompts = [
        shared + draw.choices(range(VOCAB_SIZE), k=num_tokens - num_shared)
        for _ in range(NUM_CANDIDATES)
    ]
    params = SamplingParams(max_tokens=num_outputs, temperature=0, ignore_eos=True)
    drafts = torch.tensor([one.token_ids for one in drafter.generate(prompts, params)])
    texts = torch.cat([torch.tensor(prompts), drafts], 1)
    logits = theirs(texts[:, :-1], use_cache=False).logits[:, num_tokens - 1 :]
    best = logits.topk(2)  # each [num_candidates, num_outputs, 2]
    margins = best.values[..., 0] - best.values[..., 1]
    # Behind a toss-up, the greedy outputs of two implementations may differ.
    certain = (margins > CLEAR_CUT).cumprod(1).bool()
    wrong = certain & (best.indices[..., 0] != drafts)
    assert not wrong.any(), f"Baton drafts other tokens than transformers: {wrong.nonzero()}"
    examples = [
        Example(prompt, output)
        for prompt, output, is_certain in zip(prompts, drafts.tolist(), certain[:, -1], strict=True)
        if is_certain and len(set(output)) >= NUM_DIFFERENT
    ]
    assert len(examples) >= num_examples, (
        f"{len(examples)} of {NUM_CANDIDATES} random prompts have a certain and lively output "
        f"(margins {margins.amin(1).tolist()}): give the row another initializer_range"
    )
    return examples[:num_examples]
