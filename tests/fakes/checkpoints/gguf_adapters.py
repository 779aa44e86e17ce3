"""LoRA adapters of PEFT as GGUF files, as llama.cpp's `convert_lora_to_gguf.py` makes them.

Refuses to know: how Baton reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.checkpoints.gguf_conversion import converted

_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def convert_adapter(folder: Path, path: Path, architecture: str, config: Any) -> Path:
    """Write the GGUF form of an adapter in PEFT's layout; experts must have all their parameters.

    Args:
        folder: the adapter.
        path: the file to write.
        architecture: the base model's in GGUF.
        config: the base model's, of transformers.
    """
    settings = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    for name, tensor in _tensors(folder, architecture, config):
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(folder: Path, architecture: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    stored = load_file(folder / "adapter_model.safetensors")
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    for name, a in stored.items():
        module = name.removeprefix(_PREFIX)
        if name.endswith(".lora_embedding_A"):
            yield "token_embd.weight.lora_a", a.t()
            yield "token_embd.weight.lora_b", stored[name.replace("_A", "_B")]
        elif ".experts." in name and name.endswith(".lora_A.weight"):
            b = stored[name.replace("lora_A", "lora_B")]
            yield from _of_experts(module, a, b, rank)
        elif name.endswith(".lora_A.weight"):
            weight = module.replace(".lora_A", "")
            b = stored[name.replace("lora_A", "lora_B")]
            if weight.endswith("linear_attn.out_proj.weight"):  # columns are reordered, and so A's
                ((mapped, a),) = converted(architecture, {weight: a}, config).items()
            else:
                ((mapped, b),) = converted(architecture, {weight: b}, config).items()
            yield f"{mapped}.lora_a", a
            yield f"{mapped}.lora_b", b


def _of_experts(module: str, a: Tensor, b: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Give each expert its matrices; PEFT's outer parameter is `down_proj`, the inner the other."""
    found = _LAYER.search(module)
    assert found is not None
    num_experts = len(a) // rank
    by_expert = a.view(num_experts, rank, -1)
    outputs = b.view(-1, rank, num_experts).permute(2, 0, 1)
    block = f"blk.{found[1]}.ffn"
    if ".base_layer." not in module:
        yield f"{block}_down_exps.weight.lora_a", by_expert
        yield f"{block}_down_exps.weight.lora_b", outputs
        return
    for name, half in zip(("gate", "up"), torch.chunk(outputs, 2, dim=1), strict=True):
        yield f"{block}_{name}_exps.weight.lora_a", by_expert
        yield f"{block}_{name}_exps.weight.lora_b", half
