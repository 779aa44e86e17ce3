"""Two versions of the weights of one tiny model, for tests that change weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.checkpoints.gguf_files import write_model
from tests.numerics.tiny_models import make_hugging_face_model, save

PROMPTS = [[3, 4, 5], [7], list(range(10, 31))]
OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 64}


def make_version(number: int, **shape: int) -> Any:
    """Make a tiny model of transformers; versions differ in all weights."""
    model = make_hugging_face_model("Qwen3ForCausalLM", **shape)
    torch.manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_versions(folder: Path) -> tuple[Path, Path]:
    """Save two checkpoints that differ in all weights; return their folders."""
    return save(make_version(1), folder / "old"), save(make_version(2), folder / "new")


def save_gguf_versions(folder: Path) -> tuple[Path, Path]:
    """Save two GGUF files of 8 bits that differ in all weights; return their paths."""
    kind = GGMLQuantizationType.Q8_0
    old, new = (
        write_model(
            folder / f"version-{number}.gguf", make_version(number, intermediate_size=64), kind
        )
        for number in (1, 2)
    )
    return old, new


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint."""
    return load_file(folder / "model.safetensors")
