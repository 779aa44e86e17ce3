"""Reads drafters' folders and loads their weights. Refuses to know: how drafters compute drafts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.api.errors import ModelLoadError, reason_of
from baton_kernels.ops import Ops
from models.decoder import DecoderForCausalLM
from models.fields import Fields
from models.loading.loader import WeightPacker, fill_model
from models.loading.stored_weights import StoredTensor, open_safetensors


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter's files, and the target model.

    Attributes:
        folder: the drafter's folder; None: the target model's folder also contains the drafter.
        model_folder: the target model's folder.
        model: the loaded target model.
        dtype, device, packer, ops, max_model_len: as in the call of `load_model` for the target.
    """

    folder: Path | None
    model_folder: Path
    model: DecoderForCausalLM
    dtype: torch.dtype
    device: torch.device
    packer: WeightPacker | None = None
    ops: Ops | None = None
    max_model_len: int | None = None

    @property
    def where(self) -> Path:
        """Return the folder that contains the drafter."""
        return self.folder or self.model_folder

    def fields(self) -> Fields:
        """Read the ``config.json`` in the drafter's folder; raises ModelLoadError."""
        return Fields.from_file(self.where / "config.json")

    def fill(self, drafter: DecoderForCausalLM, stored: Mapping[str, StoredTensor]) -> None:
        """Load a drafter's weights; raises ModelLoadError for a missing or misshapen tensor."""
        where = (self.where, stored, self.dtype, self.device)
        fill_model(drafter, *where, self.packer, self.ops)

    def open(self, files: ExitStack) -> dict[str, StoredTensor]:
        """Open the tensors of all safetensors files; without such files, those of pickled files.

        Pickled files are read with torch's loader for tensors only, which runs no code.
        """
        where = self.where
        if not where.is_dir():
            raise ModelLoadError(f"{where}: no such folder (speculative_model)")
        paths = sorted(where.glob("*.safetensors"))
        if paths:
            return open_safetensors(paths, files)
        pickled = [*sorted(where.glob("*.pt")), *sorted(where.glob("pytorch_model*.bin"))]
        if not pickled:
            raise ModelLoadError(f"{where}: no weights: no .safetensors, .pt or .bin")
        return {name: one for path in pickled for name, one in _read_pickled(path).items()}


def _read_pickled(path: Path) -> dict[str, StoredTensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for broken files, torch and pickle raise many types of exceptions
        raise ModelLoadError(f"{path}: cannot be read: {reason_of(error)}") from error
    if not isinstance(content, Mapping):
        raise ModelLoadError(f"{path}: is no table of tensors")
    return {
        name: StoredTensor(path, name, functools.partial(torch.detach, tensor))
        for name, tensor in content.items()
        if isinstance(tensor, Tensor)
    }


def check_shape(where: Path, what: str, found: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless a drafter's matrix has the shape that the target model needs."""
    if tuple(found.shape) != expected:
        raise ModelLoadError(f"{where}: {what}: {list(found.shape)}, not {list(expected)}")


def check_width(where: Path, name: str, found: int, expected: int) -> None:
    """Raise ModelLoadError unless a size of the drafter equals the target model's."""
    if found != expected:
        raise ModelLoadError(f"{where}: {name}: {found}, but the model's is {expected}")
