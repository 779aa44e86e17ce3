"""A model that differs from another only in its weights: one tensor is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def make_foreign_model(model: Path, folder: Path) -> Path:
    """Copy a model folder to ``folder`` and change it as a fine-tune would."""
    foreign = folder / "foreign_model"
    shutil.copytree(model, foreign)
    path = foreign / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda name: (tensors[name].numel(), name))
    tensors[name] = tensors[name].roll(1, dims=0)
    save_file(tensors, path)
    return foreign
