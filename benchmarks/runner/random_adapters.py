"""Writes random LoRA adapters of given shapes, for figures that depend on shapes only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Layer's name in a checkpoint -> (name in GGUF, kind of inputs, kind of outputs).
LAYERS = {
    "self_attn.q_proj": ("attn_q", "hidden", "queries"),
    "self_attn.k_proj": ("attn_k", "hidden", "keys"),
    "self_attn.v_proj": ("attn_v", "hidden", "keys"),
    "self_attn.o_proj": ("attn_output", "queries", "hidden"),
    "mlp.gate_proj": ("ffn_gate", "hidden", "inner"),
    "mlp.up_proj": ("ffn_up", "hidden", "inner"),
    "mlp.down_proj": ("ffn_down", "inner", "hidden"),
}
# (number of the layer, name in LAYERS, "A" or "B") -> matrix
Matrices = Mapping[tuple[int, str, str], "Tensor"]


def random_matrices(shape: Mapping[str, Any], rank: int) -> Matrices:
    """Draw a random adapter: the bfloat16 matrices A and B of each linear layer."""
    import torch

    torch.manual_seed(rank)
    width = shape["head_dim"]
    sizes = {
        "hidden": shape["hidden_size"],
        "inner": shape["intermediate_size"],
        "queries": width * shape["num_attention_heads"],
        "keys": width * shape["num_key_value_heads"],
    }
    return {
        (index, layer, matrix): (torch.randn(size) * 0.02).bfloat16()
        for index in range(shape["num_hidden_layers"])
        for layer, (_, inputs, outputs) in LAYERS.items()
        for matrix, size in (("A", (rank, sizes[inputs])), ("B", (sizes[outputs], rank)))
    }


def save_adapter(folder: Path, matrices: Matrices, rank: int) -> None:
    """Write an adapter in PEFT's layout."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = [layer.partition(".")[2] for layer in LAYERS]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        f"base_model.model.model.layers.{index}.{layer}.lora_{matrix}.weight": numbers
        for (index, layer, matrix), numbers in matrices.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
