"""How each architecture's config.json is read: its defaults, and which fields it computes with.

Defaults equal those of transformers' configuration classes (tests/numerics/test_config_fields.py).
A field that changes results, and that an architecture does not compute with, is refused by name.
Refuses to know: torch, what a field means for a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from models.fields import Fields

# Activations of gated units by their names in config.json, and what they are called here.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
# Fields that only some architectures compute with -> values with which they change nothing.
_OPTIONAL: Mapping[str, tuple[object, ...]] = {
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None,),
    "use_qk_norm": (None, False),
    "attention_chunk_size": (None,),  # of Llama 4, whose layers attend within chunks
    "per_layer_config": (None, {}),
    "rope_local_base_freq": (None,),
}
# transformers' attention masks read this field for every architecture; null counts as false there.
_IS_CAUSAL = "is_causal"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One architecture's way to write a config.json.

    Attributes:
        defaults: values of fields that the file lacks; null in the file stays null.
        defaults_for_null: values of fields that the file lacks or sets to null.
        reads: optional fields that the model uses.
        activations: activations of its gated units, besides silu.
        activation_field: name of the field with the activation.
        sliding_window_pattern: one of every so many layers has full attention, if the file names
            no layer types; None: the file says how many.
        ropes_by_layer_type: layers with a window may turn otherwise than those without.
        partial_rotary: only the first dims of a head turn, where the file says so.
        attention_sinks: each head has a learned sink.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    defaults_for_null: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    activations: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    sliding_window_pattern: int | None = None
    ropes_by_layer_type: bool = False
    partial_rotary: bool = False
    attention_sinks: bool = False

    def fill(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return a file's fields, with the architecture's defaults for missing ones."""
        found = {name: value for name, value in values.items() if value is not None}
        return {**self.defaults, **values, **self.defaults_for_null, **found}

    def activation(self, fields: Fields) -> str:
        """Read the activation; ModelLoadError if the architecture is not computed with it."""
        name = fields.text(self.activation_field, "silu")
        found = _ACTIVATIONS.get(name)
        known = ("silu", *self.activations)
        if found is None or found not in known:
            supported = ", ".join(key for key, value in _ACTIVATIONS.items() if value in known)
            problem = f"{name!r} is not supported; supported: {supported}"
            raise fields.wrong(self.activation_field, problem)
        return found

    def window_pattern(self, fields: Fields) -> int:
        """Return n where one of every n layers has full attention, if the file names no types."""
        return self.sliding_window_pattern or fields.integer("sliding_window_pattern", 1)

    def refuse_unread(self, fields: Fields) -> None:
        """Raise ModelLoadError for an optional field that would not be computed with."""
        for name, neutral in _OPTIONAL.items():
            if name not in self.reads and fields.get(name) not in neutral:
                raise fields.wrong(name, "is not supported with this architecture")
        if _IS_CAUSAL in fields.names() and not fields.get(_IS_CAUSAL):
            raise fields.wrong(_IS_CAUSAL, "only true is supported")


_GELU = ("gelu_tanh", "gelu")
_GATED = Dialect(activations=_GELU)
_GEMMA = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
_GRANITE = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
_GEMMA2_DEFAULTS: Mapping[str, object] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_MISTRAL = Dialect(
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    activations=_GELU,
)
_GLM = Dialect(
    defaults={
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    partial_rotary=True,
)
_QWEN3_NEXT = Dialect(
    defaults={
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
    },
    partial_rotary=True,
)
_QWEN3_5 = replace(_QWEN3_NEXT, defaults={**_QWEN3_NEXT.defaults, "num_key_value_heads": 4})
# These files name no size for a dense MLP, as no layer has one.
_QWEN3_5_MOE = replace(_QWEN3_NEXT, defaults={**_QWEN3_NEXT.defaults, "intermediate_size": 1})
_DIALECTS: Mapping[str, Dialect] = {
    "BambaForCausalLM": Dialect(defaults={"num_key_value_heads": 8}),
    "CwmForCausalLM": Dialect(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 8192,
            "rope_theta": 1_000_000.0,
        },
        defaults_for_null={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "DeepseekV2ForCausalLM": Dialect(defaults={"q_lora_rank": 1536}),
    "DeepseekV3ForCausalLM": Dialect(
        defaults={
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
    "Gemma2ForCausalLM": Dialect(
        defaults={
            **_GEMMA2_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        reads=_GEMMA,
        activations=_GELU,
        activation_field="hidden_activation",
        sliding_window_pattern=2,
    ),
    "Gemma3ForCausalLM": Dialect(
        defaults={
            **_GEMMA2_DEFAULTS,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        reads=_GEMMA - {"attn_logit_softcapping"} | {"rope_local_base_freq"},
        activations=_GELU,
        activation_field="hidden_activation",
        ropes_by_layer_type=True,
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "Glm4MoeForCausalLM": Dialect(
        defaults={"partial_rotary_factor": 0.5, "num_key_value_heads": 8},
        reads=frozenset({"use_qk_norm"}),
        partial_rotary=True,
    ),
    "GptOssForCausalLM": Dialect(
        defaults={
            "torch_dtype": "bfloat16",
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
        },
        defaults_for_null={
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        sliding_window_pattern=2,
        attention_sinks=True,
    ),
    "GraniteForCausalLM": Dialect(
        defaults={"attention_multiplier": 1.0},
        reads=_GRANITE,
        activations=_GELU,
    ),
    "GraniteMoeHybridForCausalLM": Dialect(
        defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6},
        reads=_GRANITE | {"no_rope_layers"},
    ),
    "Lfm2ForCausalLM": Dialect(defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0}),
    "LlamaForCausalLM": _GATED,
    "MinistralForCausalLM": replace(_MISTRAL, activations=()),
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": Dialect(defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0}),
    "NemotronHForCausalLM": Dialect(defaults={"num_key_value_heads": 8}),
    "Olmo2ForCausalLM": _GATED,
    "Olmo3ForCausalLM": Dialect(
        defaults={
            "sliding_window": 4096,
            "rope_theta": 500_000.0,
            # In a file without rope_parameters, transformers applies rope_theta to full attention.
            "rope_local_base_freq": 500_000.0,
        },
        activations=_GELU,
        ropes_by_layer_type=True,
        sliding_window_pattern=4,
    ),
    "Phi3ForCausalLM": Dialect(
        defaults={"original_max_position_embeddings": 4096},
        activations=_GELU,
        partial_rotary=True,
    ),
    "Qwen2ForCausalLM": Dialect(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096}, activations=_GELU
    ),
    "Qwen2MoeForCausalLM": Dialect(defaults={"num_key_value_heads": 16, "sliding_window": 4096}),
    "Qwen3ForCausalLM": Dialect(
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        activations=_GELU,
    ),
    "Qwen3MoeForCausalLM": Dialect(defaults={"num_key_value_heads": 4, "sliding_window": 4096}),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "SeedOssForCausalLM": Dialect(
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    ),
    "SmolLM3ForCausalLM": Dialect(
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
        },
        reads=frozenset({"no_rope_layers"}),
        activations=_GELU,
    ),
}


def dialect_of(architecture: str) -> Dialect:
    """Return how an architecture's config.json is read."""
    return _DIALECTS.get(architecture, Dialect())
