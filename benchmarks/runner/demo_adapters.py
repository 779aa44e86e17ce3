"""Writes LoRA adapters for the demo model with random weights, which change its outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.runner.environment import DEMO_MODEL

# The rank of each adapter, and the layers that the adapter changes.
ADAPTERS = {
    "a": (4, ("self_attn.q_proj",)),
    "b": (8, ("self_attn.q_proj", "self_attn.v_proj")),
    "c": (16, ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")),
}
_SCALE = 0.2  # scale of the random values in the matrices A and B


def write_adapters(root: Path) -> Mapping[str, Path]:
    """Write the adapters `ADAPTERS` in PEFT's layout below ``root``; return folders by name."""
    from safetensors import safe_open

    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    for seed, name in enumerate(ADAPTERS):
        _write_adapter(root / name, shapes, name, seed)
    return {name: root / name for name in ADAPTERS}


def _write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], name: str, seed: int
) -> None:
    import torch
    from safetensors.torch import save_file

    rank, layers = ADAPTERS[name]
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for weight, shape in shapes.items():
        module = weight.removesuffix(".weight")
        if module.endswith(layers):
            outputs, inputs = shape
            for matrix, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(size, generator=draw) * _SCALE
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = numbers
    folder.mkdir(parents=True)
    targets = sorted(layer.partition(".")[2] for layer in layers)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
