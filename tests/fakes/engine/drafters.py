"""Drafters for tests: of any small model, made of its own weights or of random ones.

A draft model is the model's first layers; heads and layers are untrained, and right by chance, or
where noise decides. Refuses to know: what is asserted.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_MEDUSA_HEADS = 5
_SPREAD = 0.02


def options_of(method: str, model_folder: Path) -> dict[str, Any]:
    """Return the engine options with which a method drafts for a model."""
    if method == "ngram":
        return {"speculative_method": method, "ngram_min": 1}
    return {
        "speculative_method": method,
        "speculative_model": str(drafter_folder(method, model_folder)),
    }


@functools.cache
def drafter_folder(method: str, model_folder: Path) -> Path:
    """Return a drafter trained for the model if its folder has one, else make a temporary one.

    (Of Medusa heads tests want more than were trained: the last ones are made.)
    """
    trained = model_folder / method
    if trained.is_dir() and method != "medusa":
        return trained
    folder = Path(tempfile.mkdtemp(prefix=f"baton-{method}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    stored = load_file(model_folder / "model.safetensors")
    generator = torch.Generator().manual_seed(len(method))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * _SPREAD

    tensors, config = _MAKERS[method](config, stored, random)
    if trained.is_dir():
        tensors |= load_file(trained / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: one.contiguous() for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _draft_model(
    config: dict[str, Any], stored: Mapping[str, Tensor], random: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make a draft model of all layers but the last."""
    num_layers = config["num_hidden_layers"] - 1
    config = {**config, "num_hidden_layers": num_layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    return {n: t for n, t in stored.items() if f"layers.{num_layers}." not in n}, config


def _medusa(
    config: dict[str, Any], stored: Mapping[str, Tensor], random: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make a Medusa checkpoint as its authors write one, with the model's own output matrix."""
    width, tensors = config["hidden_size"], {}
    for head in range(NUM_MEDUSA_HEADS):
        tensors[f"{head}.0.linear.weight"] = random(width, width)
        tensors[f"{head}.0.linear.bias"] = random(width)
    return tensors, {"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1}


def _layer(config: dict[str, Any], random: Any, *, inputs: int = 1) -> dict[str, Tensor]:
    """Make a layer like Llama's whose attention takes several vectors, concatenated."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = config["head_dim"] * config["num_attention_heads"]
    kv_size = config["head_dim"] * config["num_key_value_heads"]
    return {
        "self_attn.q_proj.weight": random(size, inputs * width),
        "self_attn.k_proj.weight": random(kv_size, inputs * width),
        "self_attn.v_proj.weight": random(kv_size, inputs * width),
        "self_attn.o_proj.weight": random(width, size),
        "mlp.gate_proj.weight": random(inner, width),
        "mlp.up_proj.weight": random(inner, width),
        "mlp.down_proj.weight": random(width, inner),
        "post_attention_layernorm.weight": torch.ones(width),
    }


def _eagle(
    config: dict[str, Any], stored: Mapping[str, Tensor], random: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make an EAGLE checkpoint as its authors write one: no norm before attention or at the end."""
    width = config["hidden_size"]
    tensors = {f"layers.0.{name}": one for name, one in _layer(config, random).items()}
    # Nearly the state before, as the next token's state is close to it.
    tensors["fc.weight"] = torch.cat([random(width, width), torch.eye(width)], 1)
    return tensors, {**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


def _mtp(
    config: dict[str, Any], stored: Mapping[str, Tensor], random: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make an MTP checkpoint as Qwen writes one, with the model's last layer."""
    width, last = config["hidden_size"], config["num_hidden_layers"] - 1
    tensors = {
        f"mtp.layers.0.{name.partition(f'layers.{last}.')[2]}": one
        for name, one in stored.items()
        if f"layers.{last}." in name
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.ones(width)
    tensors["mtp.fc.weight"] = torch.cat([random(width, width), torch.eye(width)], 1)
    return tensors, config


_MAKERS: dict[str, Any] = {
    "draft_model": _draft_model, "medusa": _medusa, "eagle": _eagle, "mtp": _mtp,
}  # fmt: skip
