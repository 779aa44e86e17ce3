"""GGUF config: rebuilds config.json from a GGUF file's metadata.

Does not read the vocabulary's texts; reads no tensors but the factors of rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.architecture import Keys
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile
from baton.checkpoint.gguf.rope import DEFAULT_THETA, rope_scaling
from baton.checkpoint.gguf.table import architecture_of

# Metadata keys of tokens that end a turn or a text; a file has one or two of these keys.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|eot|>", "<|eom|>"),
        *("<turn|>", "<|tool_response>"),
        "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}"
        "sentence\N{FULLWIDTH VERTICAL LINE}>",
    )
)
# End tokens of gpt-oss, where <|end|> ends a message within an answer but not the answer.
_HARMONY = frozenset(("<|return|>", "<|call|>"))
_MESSAGE_END = "<|end|>"
_CONTROL, _USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of `config.json`; raises ModelLoadError for unsupported models."""
    row, keys = architecture_of(file), Keys.of(file)
    num_heads = keys.integer("attention.head_count")
    # Default of the intermediate size, which files lack if all layers have experts.
    no_size = 1 if keys.get("expert_count") else None
    return {
        "architectures": [row.model],
        "attention_bias": keys.has("attn_q.bias") or keys.has("attn_qkv.bias"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "compute_dtype": _compute_dtype(file),
        "dtype": _dtype(file),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length", no_size),
        "max_position_embeddings": keys.integer("context_length"),
        "mlp_bias": keys.has("ffn_up.bias"),
        "num_attention_heads": num_heads,
        "num_hidden_layers": keys.num_layers(),
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_scaling": rope_scaling(keys),
        "rope_theta": keys.decimal("rope.freq_base", DEFAULT_THETA),
        "sliding_window": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _embedding_shape(file)[0],
        **row.heads(keys),
        **row.fields(keys),
    }


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of `generation_config.json`: all tokens that can end an output."""
    metadata = file.metadata
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    special = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _END_TOKENS
    }
    if special.keys() >= _HARMONY:
        special.pop(_MESSAGE_END, None)
    ids += special.values()
    known = [token_id for token_id in ids if isinstance(token_id, int)]
    return {"eos_token_id": sorted(set(known))}


def _dtype(file: GgufFile) -> str:
    """Choose the dtype of the weights: the dtype of a 16-bit file, or else float32.

    Float32 holds dequantized values exactly. Tensors in float32 are not considered, because every
    file stores routers and convolutions in float32.
    """
    kinds = _matrix_kinds(file)
    if len(kinds) != 1:
        return "float32"
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32")


def _compute_dtype(file: GgufFile) -> str:
    """Choose the dtype to compute in: the file's dtype, or bfloat16 for quantized weights."""
    return "bfloat16" if _matrix_kinds(file) - {"F16", "BF16"} else _dtype(file)


def _matrix_kinds(file: GgufFile) -> set[str]:
    """Return the storage types of the file's matrices, except float32."""
    kinds = {TENSOR_TYPES[t.type_id].name for t in file.tensors.values() if len(t.shape) > 1}
    return kinds - {"F32"}


def _embedding_shape(file: GgufFile) -> Sequence[int]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path}: weights are missing: token_embd.weight")
    return embedding.shape
