"""What a GGUF file's metadata says about the network, as the config.json it once was.

Refuses to know: text, tensors' content (but the few numbers that scale rotary frequencies).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile

# GGUF's architecture -> ours. Files of Mistral's models say llama: the networks are the same, but
# for a sliding window.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_WITH_WINDOW = "MistralForCausalLM"
_WITH_EXPERTS = {"llama": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
# Tokens that end a turn or a text: a file names one or two of them by number.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>")
)
_CONTROL = 3  # of tokenizer.ggml.token_type
# Of every Llama 3.1 to 3.3; the factor differs.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
_SAME = 1e-4


@dataclass(frozen=True, slots=True)
class _Keys:
    """An architecture's metadata, whose keys begin with its name."""

    file: GgufFile
    architecture: str

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, f"must be a number above 0, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, f"must be a number above 0, got {value!r}")
        return float(value)

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def wrong(self, name: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: {self.architecture}.{name}: {problem}")


def config_of(file: GgufFile) -> dict[str, Any]:
    """Make the content of `config.json`; raises ModelLoadError for what Baton cannot serve."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)} (which files of Mistral's models say, too)"
        )
    keys = _Keys(file, architecture)
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    window = keys.get("attention.sliding_window")
    is_windowed = architecture == "llama" and bool(window)
    experts = _experts(keys)
    ours = _WITH_WINDOW if is_windowed else _ARCHITECTURES[architecture]
    return {
        **experts,
        "architectures": [_WITH_EXPERTS[architecture] if experts else ours],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(file),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "head_dim": _head_dim(keys, hidden_size // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "num_attention_heads": num_heads,
        "num_hidden_layers": keys.integer("block_count"),
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(keys),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "sliding_window": window if is_windowed else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _embedding_shape(file)[0],
    }


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Make the content of `generation_config.json`: every token that ends an output."""
    metadata = file.metadata
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    ids += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    known = [token_id for token_id in ids if isinstance(token_id, int)]
    return {"eos_token_id": sorted(set(known))}


def _dtype(file: GgufFile) -> str:
    """Choose the dtype: a 16-bit file's own, else float32, in which quantized values are exact."""
    kinds = {TENSOR_TYPES[t.type_id].name for t in file.tensors.values() if len(t.shape) > 1}
    if len(kinds) != 1:
        return "float32"
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32")


def _embedding_shape(file: GgufFile) -> Sequence[int]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path}: weights are missing: token_embd.weight")
    return embedding.shape


def _experts(keys: _Keys) -> Mapping[str, Any]:
    """Fields about experts, of those that have some; all layers do."""
    if not keys.get("expert_count"):
        return {}
    if keys.architecture not in _WITH_EXPERTS:
        known = ", ".join(_WITH_EXPERTS)
        raise keys.wrong("expert_count", f"experts are supported in {known} alone")
    if keys.get("expert_shared_count"):
        raise keys.wrong("expert_shared_count", "shared experts are not supported")
    count, top_k = keys.integer("expert_count"), keys.integer("expert_used_count")
    if keys.architecture == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": top_k}
    return {
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }


def _head_dim(keys: _Keys, default: int) -> int:
    head_dim = keys.integer("attention.key_length", keys.get("rope.dimension_count") or default)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.integer(name, head_dim)) != head_dim:
            raise keys.wrong(name, f"must be the keys' length {head_dim}, got {found}")
    return head_dim


def _rope_scaling(keys: _Keys) -> Mapping[str, Any] | None:
    if ROPE_FACTORS in keys.file.tensors:
        return _rope_of_factors(keys, keys.file.floats(ROPE_FACTORS))
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise keys.wrong("rope.scaling.type", f"{kind!r} is not supported; supported: linear, yarn")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length")
        )
        for name in ("beta_fast", "beta_slow"):
            if keys.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaling


def _rope_of_factors(keys: _Keys, factors: Sequence[float]) -> Mapping[str, Any]:
    """Llama 3's scaling, if these are its factors: the same numbers as from its config.json."""
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelLoadError(f"{keys.file.path}: {ROPE_FACTORS}: must be numbers above 0")
    largest = max(factors)
    theta = keys.number("rope.freq_base", 10_000.0)
    llama3 = list(_llama3_factors(theta, len(factors), largest))
    if all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(factors, llama3, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": round(largest, 4),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
    return {
        "rope_type": "longrope",  # which takes a factor for each frequency
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.integer("context_length"),
    }


def _llama3_factors(theta: float, number: int, factor: float) -> Iterable[float]:
    """Compute how much slower each pair of a head turns (Llama 3.1, arXiv:2407.21783)."""
    for index in range(number):
        wavelength = 2 * math.pi * theta ** (index / number)
        share = (_LLAMA3_LENGTH / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        share = min(max(share, 0.0), 1.0)
        yield 1 / ((1 - share) / factor + share)
