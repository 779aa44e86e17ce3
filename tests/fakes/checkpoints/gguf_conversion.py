"""Checkpoints of transformers as GGUF files, as llama.cpp's `conversion` folder makes them.

Names are those that the `gguf` package maps. What is done to tensors is written here once more,
the other way round than in Baton. Refuses to know: how Baton reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, TensorNameMap
from torch import Tensor

from tests.fakes.checkpoints.gguf_files import Vocabulary, plain_vocabulary, stored, write_gguf

Fields = Mapping[str, Any]
_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)"
)
_FUSED_OF_GPT_OSS = tuple(
    f"experts.{part}{suffix}" for part in ("gate_up_proj", "down_proj") for suffix in ("", "_bias")
)
_OF_GEMMA4 = (
    *("experts.gate_up_proj", "experts.gate_proj.weight", "experts.up_proj.weight"),
    *("router.scale", "router.per_expert_scale", "layer_scalar"),
)
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Stored in 32 bits in every file.
_EXACT = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv.", "exp_probs_b", "ssm_a", "ssm_d")
_ROTATED_AS_LLAMA = (
    *("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3"),
    *("nemotron_h", "nemotron_h_moe"),
)
_DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
_NORMS_PLUS_ONE = ("gemma2", "gemma3", *_DELTA_NETS)


def converted(
    architecture: str, checkpoint: Mapping[str, Tensor], config: Any
) -> dict[str, Tensor]:
    """Turn a checkpoint's tensors into a GGUF file's, in float32."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    kept = {
        name: tensor.float()
        for name, tensor in checkpoint.items()
        if not (name == "lm_head.weight" and tied)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in _parts(architecture, _stacked(kept), config):
        if name.startswith(("blk.", "token_embd", "output")):
            found[name] = tensor
            continue
        mapped = _mapped(names, name)
        assert mapped is not None, f"{architecture}: {name}"
        found[mapped] = _changed(architecture, name, mapped, tensor, config)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _mapped(names: TensorNameMap, name: str) -> str | None:
    return names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(
        name + ".weight", try_suffixes=(".weight",)
    )


def _stacked(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack experts, which a checkpoint keeps one by one, in one tensor."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in checkpoint.items():
        one = _EXPERT.fullmatch(name)
        if one is None:
            found[name] = tensor
        else:
            key = f"{one['prefix']}.{one['part']}.{one['kind']}"
            experts.setdefault(key, {})[int(one["expert"])] = tensor
    for name, by_number in experts.items():
        found[name] = torch.stack([by_number[number] for number in range(len(by_number))])
    return found


def _parts(
    architecture: str, checkpoint: Mapping[str, Tensor], config: Any
) -> Iterator[tuple[str, Tensor]]:
    """Cut tensors that a GGUF file keeps apart, and give tensors the file's own names."""
    for name, tensor in checkpoint.items():
        layer = _LAYER.search(name)
        block = f"blk.{layer[1]}." if layer else ""
        if architecture == "gpt-oss" and name.endswith(_FUSED_OF_GPT_OSS):
            yield from _of_gpt_oss(block, name, tensor)
        elif architecture == "gemma4" and name.endswith(_OF_GEMMA4):
            yield from _of_gemma4(block, name, checkpoint)
        elif name.endswith(("block_sparse_moe.input_linear.weight", "experts.gate_up_proj")):
            gate, up = tensor.chunk(2, dim=1)
            yield f"{block}ffn_gate_exps.weight", gate
            yield f"{block}ffn_up_exps.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{block}ffn_down_exps.weight", tensor
        elif "shared_mlp" in name:
            suffix = "_shexp" if config.num_local_experts else ""
            if "output_linear" in name:
                yield f"{block}ffn_down{suffix}.weight", tensor
            else:
                gate, up = tensor.chunk(2)
                yield f"{block}ffn_gate{suffix}.weight", gate
                yield f"{block}ffn_up{suffix}.weight", up
        elif name.endswith("kv_b_proj.weight"):
            nope, value = config.qk_nope_head_dim, config.v_head_dim
            heads = tensor.view(config.num_attention_heads, nope + value, -1)
            yield f"{block}attn_k_b.weight", heads[:, :nope].transpose(1, 2)
            yield f"{block}attn_v_b.weight", heads[:, nope:]
        elif name.endswith("in_proj_qkvz.weight"):
            yield from _of_qwen3_next(block, tensor, config)
        elif ".block_sparse_moe.experts." in name:  # Mixtral's
            inner = name.replace("model.layers.", "layers.")
            yield inner.replace(".block_sparse_moe.", ".feed_forward."), tensor
        elif ".mixer.experts." in name:  # Nemotron's
            inner = name.replace("backbone.", "model.")
            yield inner.replace(".mixer.", ".mlp."), tensor
        elif name.endswith(("dt_bias", "self_attn.sinks")):
            new = name.replace("dt_bias", "dt_proj.bias").replace("mixer.dt_proj", "mixer.dt")
            yield new.replace(".sinks", ".sinks.weight"), tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        else:
            yield name, tensor


def _of_gpt_oss(block: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = "bias" if name.endswith("_bias") else "weight"
    outputs_first = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "down_proj" in name:
        yield f"{block}ffn_down_exps.{kind}", outputs_first
    else:
        yield f"{block}ffn_gate_exps.{kind}", outputs_first[:, ::2]
        yield f"{block}ffn_up_exps.{kind}", outputs_first[:, 1::2]


def _of_gemma4(
    block: str, name: str, checkpoint: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Keep the experts' gates and ups in one tensor; name scales as the converter does."""
    tensor = checkpoint[name]
    if name.endswith("experts.gate_proj.weight"):
        ups = checkpoint[name.replace("gate_proj", "up_proj")]
        yield f"{block}ffn_gate_up_exps.weight", torch.cat([tensor, ups], dim=1)
    elif name.endswith("experts.gate_up_proj"):
        yield f"{block}ffn_gate_up_exps.weight", tensor
    elif name.endswith("router.scale"):
        yield f"{block}ffn_gate_inp.scale", tensor
    elif name.endswith("router.per_expert_scale"):
        yield f"{block}ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar"):
        yield f"{block}layer_output_scale.weight", tensor


def _of_qwen3_next(block: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Cut queries, keys, values and gates out of rows that are ordered by key head."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = tensor.view(heads, -1, tensor.shape[1])
    parts = torch.split(by_head, [key, key, values, values], dim=1)
    query, keys, value, gate = (part.flatten(0, 1) for part in parts)
    yield f"{block}attn_qkv.weight", torch.cat([query, keys, value])
    yield f"{block}attn_gate.weight", gate


def _changed(architecture: str, name: str, mapped: str, tensor: Tensor, config: Any) -> Tensor:
    if architecture in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        tensor = _tiled(name, tensor, config)
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
        tensor = tensor if name.endswith("linear_attn.norm.weight") else tensor + 1
    if architecture in _ROTATED_AS_LLAMA:
        for part, heads in (
            ("q_proj.", config.num_attention_heads),
            ("k_proj.", config.num_key_value_heads),
        ):
            tensor = _paired(tensor, heads) if part in name else tensor
    if "conv" in name and name.endswith("weight") and tensor.dim() == 3:
        tensor = tensor.squeeze(1)
    if mapped.endswith(("ssm_a", "ssm_d")) and architecture not in _DELTA_NETS:
        tensor = tensor.view(-1, 1)
    if mapped.endswith("ssm_norm.weight") and architecture not in _DELTA_NETS:
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        tensor = tensor.view(groups, -1)
    return tensor


def _paired(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder a head's rows from halves to pairs."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _tiled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Reorder value heads: first the first of each key head, then the second of each."""
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    num_channels = 2 * num_keys * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        values = _heads_tiled(tensor[num_channels:], num_keys, num_values)
        return torch.cat([tensor[:num_channels], values])
    if "out_proj" in name:
        size = config.linear_value_head_dim
        columns = tensor.view(len(tensor), num_keys, num_values // num_keys, size)
        return columns.transpose(1, 2).reshape(tensor.shape)
    if name.endswith("linear_attn.norm.weight"):
        return tensor
    return _heads_tiled(tensor, num_keys, num_values)


def _heads_tiled(tensor: Tensor, num_keys: int, num_values: int) -> Tensor:
    heads = tensor.reshape(num_keys, num_values // num_keys, -1, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def write_checkpoint(
    path: Path,
    architecture: str,
    tensors: Mapping[str, Tensor],
    kind: GGMLQuantizationType,
    fields: Fields,
    *,
    vocab_size: int,
    vocabulary: Vocabulary | None = None,
    num_parts: int = 1,
) -> Path:
    """Write a file, or several parts; tensors whose rows do not fit ``kind`` are of 32 bits.

    Returns the file, or the first part.
    """
    found = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        values = tensor.numpy()
        per_block = gguf.GGML_QUANT_SIZES[kind][0]
        fits = values.ndim > 1 and values.shape[-1] % per_block == 0
        is_exact = not fits or any(part in name for part in _EXACT)
        one = GGMLQuantizationType.F32 if is_exact else kind
        found[name] = (stored(values, one, number), one)
    vocabulary = vocabulary or plain_vocabulary(vocab_size)
    return write_gguf(path, architecture, found, fields, vocabulary, num_parts=num_parts)
