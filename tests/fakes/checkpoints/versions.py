"""Two versions of the weights of one tiny model, for tests that change weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.numerics.tiny_models import make_hugging_face_model, save

PROMPTS = [[3, 4, 5], [7], list(range(10, 31))]
OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 64}


def save_versions(folder: Path) -> tuple[Path, Path]:
    """Save two checkpoints that differ in all weights; return their folders."""
    folders = []
    for number, name in enumerate(("old", "new")):
        model = make_hugging_face_model("Qwen3ForCausalLM")
        torch.manual_seed(number + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        folders.append(save(model, folder / name))
    return folders[0], folders[1]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint."""
    return load_file(folder / "model.safetensors")
