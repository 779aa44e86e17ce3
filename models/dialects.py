"""How each architecture's config.json is read: its defaults, and which fields it computes with.

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
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One architecture's way to write a config.json.

    Attributes:
        defaults: of fields that the file lacks, as transformers has them.
        reads: the optional fields that it computes with.
        activations: of its gated units, besides silu.
        activation_field: where the file names the activation.
        ropes_by_layer_type: layers with a window may turn otherwise than those without.
        partial_rotary: only the first dims of a head turn, where the file says so.
        attention_sinks: each head has a learned sink.
    """

    defaults: Mapping[str, object] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    activations: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    ropes_by_layer_type: bool = False
    partial_rotary: bool = False
    attention_sinks: bool = False

    def fill(self, values: Mapping[str, object]) -> dict[str, object]:
        """Add the defaults to a file's fields; null stays null."""
        return {**self.defaults, **values}

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

    def refuse_unread(self, fields: Fields) -> None:
        """Raise ModelLoadError for an optional field that would not be computed with."""
        for name, neutral in _OPTIONAL.items():
            if name not in self.reads and fields.get(name) not in neutral:
                raise fields.wrong(name, "is not supported with this architecture")


_GELU = ("gelu_tanh", "gelu")
_GATED = Dialect(activations=_GELU)
_GEMMA = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
_GLM4 = Dialect(
    defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128},
    partial_rotary=True,
)
_GRANITE = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
_QWEN3_NEXT = Dialect(
    defaults={"partial_rotary_factor": 0.25, "head_dim": 256, "rms_norm_eps": 1e-6},
    partial_rotary=True,
)
# Whose files say no size of what no layer has.
_QWEN3_5_MOE = replace(_QWEN3_NEXT, defaults={**_QWEN3_NEXT.defaults, "intermediate_size": 1})
_DIALECTS: Mapping[str, Dialect] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "LlamaForCausalLM": _GATED,
    "MistralForCausalLM": _GATED,
    "Qwen2ForCausalLM": _GATED,
    "Qwen3ForCausalLM": _GATED,
    "Gemma2ForCausalLM": Dialect(
        defaults={
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        reads=_GEMMA,
        activations=_GELU,
        activation_field="hidden_activation",
    ),
    "Gemma3ForCausalLM": Dialect(
        defaults={
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        reads=_GEMMA - {"attn_logit_softcapping"},
        activations=_GELU,
        activation_field="hidden_activation",
        ropes_by_layer_type=True,
    ),
    "GlmForCausalLM": _GLM4,
    "Glm4ForCausalLM": _GLM4,
    "Glm4MoeForCausalLM": Dialect(
        defaults={"partial_rotary_factor": 0.5},
        reads=frozenset({"use_qk_norm"}),
        partial_rotary=True,
    ),
    "GptOssForCausalLM": Dialect(
        defaults={
            "torch_dtype": "bfloat16",
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        attention_sinks=True,
    ),
    "GraniteForCausalLM": Dialect(
        defaults={"attention_multiplier": 1.0}, reads=_GRANITE, activations=_GELU
    ),
    "GraniteMoeHybridForCausalLM": Dialect(
        defaults={"attention_multiplier": 1.0, "rms_norm_eps": 1e-6},
        reads=_GRANITE | {"no_rope_layers"},
    ),
    "Olmo2ForCausalLM": _GATED,
    "Olmo3ForCausalLM": Dialect(
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500_000.0,
        },
        activations=_GELU,
        ropes_by_layer_type=True,
    ),
    "Phi3ForCausalLM": Dialect(activations=_GELU, partial_rotary=True),
    "SmolLM3ForCausalLM": Dialect(
        defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        reads=frozenset({"no_rope_layers"}),
        activations=_GELU,
    ),
}


def dialect_of(architecture: str) -> Dialect:
    """Return how an architecture's config.json is read."""
    return _DIALECTS.get(architecture, Dialect())
