"""Small GGUF files, written by the `gguf` package as llama.cpp's converter writes them.

Refuses to know: how Baton reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy
import tokenizers
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

Array = NDArray[Any]

# Offsets of float16 factors in blocks; all other bytes of a block are arbitrary.
_FACTORS_AT = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (0,)),
    "IQ1_M": (),
}
# IQ1_M's factor lies in the high halves of four bytes.
_FACTOR_OF_IQ1_M = ((49, 0x0), (51, 0x0), (53, 0x8), (55, 0x1))
# Kinds whose blocks are random and not made from values.
RANDOM_KINDS = tuple(_FACTORS_AT)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer fields of a GGUF file.

    Attributes:
        kind: value of ``tokenizer.ggml.model``.
        pre: value of ``tokenizer.ggml.pre``; empty: not written.
        scores: each token's score, in SentencePiece kinds.
        fields: further fields of ``tokenizer.ggml``.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    kind: str = "gpt2"
    pre: str = ""
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    chat_template: str | Sequence[Mapping[str, str]] = ""
    fields: Mapping[str, int | bool] | None = None


def vocabulary_of(tokenizer: tokenizers.Tokenizer, **options: Any) -> Vocabulary:
    """Convert a byte-level `tokenizer.json` as a converter to GGUF does."""
    added = tokenizer.get_added_tokens_decoder()
    ids = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    types = {
        token_id: TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        for token_id, token in added.items()
    }
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return Vocabulary(
        tokens=[ids[index] for index in range(len(ids))],
        types=[int(types.get(index, TokenType.NORMAL)) for index in range(len(ids))],
        merges=[" ".join(pair) for pair in merges],
        **options,
    )


def plain_vocabulary(size: int) -> Vocabulary:
    """Return tokens that no test reads: bytes' characters, numbers, and one merge."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"t{index}" for index in range(size))][:size]
    tokens[-1] = "".join(tokens[:2])
    merges = [" ".join(tokens[:2])]
    return Vocabulary(tokens, [int(TokenType.NORMAL)] * size, pre="gpt-2", merges=merges)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, tuple[Array, GGMLQuantizationType]],
    fields: Mapping[str, Any],
    vocabulary: Vocabulary | None = None,
    num_parts: int = 1,
) -> Path:
    """Write a file or its parts, and return the first; ``fields`` belong to the architecture."""
    per_part = -(-len(tensors) // num_parts) if num_parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_part)
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{name}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{name}", value)
        else:
            writer.add_float32(f"{architecture}.{name}", value)
    if vocabulary is not None:
        _add_vocabulary(writer, vocabulary)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if num_parts == 1:
        return path
    return path.with_name(f"{path.stem}-00001-of-{num_parts:05}{path.suffix}")


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    if vocabulary.pre:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
    for name, value in (vocabulary.fields or {}).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{name}", value)


def stored(values: Array, kind: GGMLQuantizationType, seed: int) -> Array:
    """Return a tensor's content in a kind of storage; for `RANDOM_KINDS` random blocks."""
    if kind.name not in _FACTORS_AT:
        return gguf.quantize(values, kind)
    rng = numpy.random.default_rng(seed)
    values_per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // values_per_block, num_bytes), dtype=numpy.uint8)
    for position in _FACTORS_AT[kind.name]:
        factors = rng.uniform(0.001, 0.004, len(blocks)).astype(numpy.float16)
        blocks[:, position : position + 2] = factors[:, None].view(numpy.uint8)
    for position, half in _FACTOR_OF_IQ1_M if kind.name == "IQ1_M" else ():
        blocks[:, position] = blocks[:, position] & 15 | half << 4
    return blocks.reshape(*values.shape[:-1], -1)


def _each_by_itself(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Split experts' weights as files have them: gates and ups apart."""
    for name, parameter in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = parameter.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), parameter


def write_model(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType,
    *,
    vocabulary: Vocabulary | None = None,
    **fields: int | float | str,
) -> Path:
    """Write a model of transformers, with all matrices in one kind of storage."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    tensors = {}
    for number, (name, parameter) in enumerate(_each_by_itself(model.state_dict())):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        path_of, _, suffix = name.rpartition(".")
        place = path_of.removeprefix("model.layers.")
        layer, _, part = place.partition(".")
        new = f"blk.{layer}.{_NAMES[part]}" if place != path_of else _NAMES[path_of]
        if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            values = _paired(values, heads)
        matrix = values.ndim > 1
        kind_of = kind if matrix else GGMLQuantizationType.F32
        tensors[f"{new}.{suffix}"] = (stored(values, kind_of, number), kind_of)
    shape: dict[str, int | float | str] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if architecture != "qwen2":  # whose heads are as wide as its sizes say
        shape |= {"attention.key_length": config.head_dim}
        shape |= {"attention.value_length": config.head_dim}
    if any(name.endswith("ffn_gate_exps.weight") for name in tensors):
        shape |= {"expert_count": config.num_local_experts}
        shape |= {"expert_used_count": config.num_experts_per_tok}
    if architecture == "qwen3moe":
        shape |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if architecture == "llama":
        shape |= {"rope.dimension_count": config.head_dim}
    vocabulary = vocabulary or plain_vocabulary(config.vocab_size)
    return write_gguf(path, architecture, tensors, shape | fields, vocabulary)


def _paired(values: Array, num_heads: int) -> Array:
    """Reorder a head's rows from halves to pairs, as the converter does for llama."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return numpy.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
