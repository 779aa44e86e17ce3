"""Write a checkpoint as a GGUF file for llama.cpp, with the package `gguf`.

The script runs with the Python of llama.cpp's environment. Refuses to know: which engines read the
file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Mixtral's names of an expert's matrices -> the names in other checkpoints.
_NAMES_OF_OTHERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Form:
    """How llama.cpp stores an architecture.

    Attributes:
        name: llama.cpp's name of the architecture.
        turns_neighbours: whether llama.cpp's rotary embedding rotates adjacent pairs of values, and
            not pairs that are half a head apart.
        norms_from: number that llama.cpp's files add to the checkpoint's norm weights.
    """

    name: str
    turns_neighbours: bool = False
    norms_from: float = 0.0


FORMS = {
    "Qwen3ForCausalLM": Form("qwen3"),
    "MistralForCausalLM": Form("llama", turns_neighbours=True),
    "Qwen3MoeForCausalLM": Form("qwen3moe"),
    "MixtralForCausalLM": Form("llama", turns_neighbours=True),
    "Gemma3ForCausalLM": Form("gemma3", norms_from=1.0),
    "DeepseekV2ForCausalLM": Form("deepseek2"),  # pairs are already adjacent in checkpoints
}


def write_gguf(folder: Path, whole: Path, kept: str) -> None:
    """Write a checkpoint as GGUF, with matrices in BF16 or all tensors in F32."""
    import gguf
    import torch

    config = json.loads((folder / "config.json").read_text())
    form = FORMS[config["architectures"][0]]
    part = whole.with_suffix(".part")
    writer = gguf.GGUFWriter(part, form.name)
    _write_vocabulary(writer, folder, config["vocab_size"])
    _write_shape(writer, config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(folder, config, form):
        called = names.get_name(name, (".weight",))
        assert called, name
        if kept == "bf16" and tensor.dim() > 1:
            raw = tensor.bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(called, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(called, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(whole)


def as_gguf(folder: Path, weights: str) -> Path:
    """Convert a checkpoint to a GGUF file beside it, with weights of this type."""
    kept = "bf16" if weights else "f32"
    whole = folder.parent / f"{folder.name}-{kept}.gguf"
    if not whole.exists():
        write_gguf(folder, whole, kept)
    if weights in ("", "bf16"):
        return whole
    path = folder.parent / f"{folder.name}-{weights}.gguf"
    if not path.exists():
        kind = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K_S"}[weights]
        quantize(
            whole, path, kind, pure=True
        )  # pure: as in other engines, all matrices get the same type
    return path


def quantize(whole: Path, path: Path, kind: str, *, pure: bool = False) -> None:
    """Quantize a GGUF file with llama.cpp's own tool.

    Args:
        whole: the file to read, quantized or not.
        path: the file to write.
        kind: name of one of llama.cpp's mixtures of types.
        pure: whether every matrix gets the type that the mixture is named after.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.pure, options.allow_requantize = pure, True
    part = path.with_suffix(".part")
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(part).encode(), options)
    assert not failed, failed
    part.rename(path)


def _write_vocabulary(writer: Any, folder: Path, size: int) -> None:
    import gguf

    tokens, merges, num_specials = _vocabulary_of(folder, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    normal = [gguf.TokenType.NORMAL] * (len(tokens) - num_specials)
    writer.add_token_types([gguf.TokenType.CONTROL] * num_specials + normal)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)


def _vocabulary_of(folder: Path, size: int) -> tuple[list[str], list[str], int]:
    """Return a vocabulary: tokens, merges, and the number of special tokens, which come first.

    If the checkpoint's vocabulary is larger than the tokenizer's, all tokens are made up.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    path = folder / "tokenizer.json"
    document = json.loads(path.read_text()) if path.exists() else {"model": {"vocab": {}}}
    own: dict[str, int] = document["model"]["vocab"]
    if len(own) == size:
        merges = [" ".join(pair) for pair in document["model"]["merges"]]
        return sorted(own, key=own.__getitem__), merges, len(document["added_tokens"])
    names = (f"<{index}>" for index in range(257, size))
    return [*sorted(ByteLevel.alphabet()), "th", *names], ["t h"], 0


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    # for Gemma; llama.cpp sets the RoPE of layers with a window itself
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if _num_experts(config):
        size = config.get("moe_intermediate_size") or config["intermediate_size"]
        writer.add_expert_count(_num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(size)
    if config.get("kv_lora_rank"):
        _write_latents(writer, config)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])


def _num_experts(config: dict[str, Any]) -> int:
    return next((config[name] for name in _COUNTS_OF_EXPERTS if config.get(name)), 0)


def _write_latents(writer: Any, config: dict[str, Any]) -> None:
    """Write the fields of latent attention (MLA): one KV head, with values inside the keys."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config.get("n_shared_experts") or 0)


def _tensors(folder: Path, config: dict[str, Any], form: Form) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors as llama.cpp stores them, with a layer's experts in one tensor."""
    import torch
    from safetensors import safe_open

    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    with safe_open(str(folder / "model.safetensors"), "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dict
            expert = _EXPERT.search(name)
            if expert and expert[1] == "0":
                every = (
                    name.replace(".experts.0.", f".experts.{i}.")
                    for i in range(_num_experts(config))
                )
                yield _expert_name(name), torch.stack([tensors.get_tensor(one) for one in every])
            if expert:
                continue
            tensor = tensors.get_tensor(name)
            if name.endswith("norm.weight"):
                tensor = tensor + form.norms_from
            if form.turns_neighbours and name.endswith("q_proj.weight"):
                tensor = _with_neighbours(tensor, num_heads)
            if form.turns_neighbours and name.endswith("k_proj.weight"):
                tensor = _with_neighbours(tensor, num_kv_heads)
            if name.endswith("kv_b_proj.weight"):
                heads = tensor.view(num_heads, -1, config["kv_lora_rank"])
                keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
                yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2).contiguous()
                yield name.replace("kv_b_proj", "v_b_proj"), values.contiguous()
            else:
                yield name, tensor


def _expert_name(name: str) -> str:
    """Return llama.cpp's name of the tensor with all experts, given the first expert's name."""
    for own, other in _NAMES_OF_OTHERS.items():
        name = name.replace(f".{own}.", f".{other}.")
    return name.replace("block_sparse_moe", "mlp").replace(".experts.0.", ".experts.")


def _with_neighbours(rows: Any, num_heads: int) -> Any:
    """Reorder each head's rows so that pairs that were half a head apart become adjacent."""
    return rows.view(num_heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
