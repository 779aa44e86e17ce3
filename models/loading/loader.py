"""Weights from files into a module, one tensor at a time, nothing allocated twice.

The module is built on the meta device (shapes only) and every parameter is replaced by its tensor
as it is read; afterwards each parameter has been seen exactly once, or loading fails.
safetensors are read here and, if quantized, in `quantized_weights.py`; GGUF in `gguf_weights.py`.
Refuses to know: architectures, pickled checkpoints (they run code).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.folder import WEIGHTS
from models.architectures.decoder import DecoderForCausalLM
from models.base import CausalLM
from models.config import ModelConfig
from models.fields import Fields
from models.layers.attention import Attention
from models.layers.linear import JoinedLinear
from models.loading.gguf_weights import read_gguf
from models.loading.quantized_weights import read_quantized
from models.registry import MODELS

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Buffers that old checkpoints carry and that every model computes itself.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_SHOWN_NAMES = 3
# Where checkpoints keep the scales of an fp8 KV cache, within a layer's attention: one number each.
_SCALES = {
    **dict.fromkeys(("k_scale", "attn.k_scale", "k_proj.k_scale"), "k_scale"),
    **dict.fromkeys(("v_scale", "attn.v_scale", "v_proj.v_scale"), "v_scale"),
}


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
) -> CausalLM:
    """See ``models.load_model``."""
    path = Path(folder)
    config = ModelConfig.from_folder(path, max_model_len=max_model_len)
    with torch.device("meta"), _NoInitialWeights():
        model = MODELS.load(config.architecture)(config)
    dtype = dtype or getattr(torch, config.dtype)
    if config.quantization is not None:
        logger.info(
            "weights are stored as %s, and kept and computed with in %s; activations are not "
            "quantized",
            config.quantization.method,
            str(dtype).removeprefix("torch."),
        )
    _load_weights(model, path, dtype, torch.device(device))
    return model.to(device).eval().requires_grad_(requires_grad=False)


class _NoInitialWeights(TorchFunctionMode):
    """Draws no random weights, which nobody would see.

    On the meta device torch goes through its compiler for them, whose import takes longer than to
    load a small model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one tensor of a checkpoint: some rows of a parameter, or all of it."""

    owner: nn.Module
    attribute: str
    rows: slice

    @property
    def shape(self) -> torch.Size:
        """What the tensor must have."""
        return self._parameter[self.rows].shape

    @property
    def _parameter(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self.owner, self.attribute)
        return parameter

    def weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the rows to fill; a parameter's first part allocates all of it."""
        if self._parameter.is_meta:
            empty = torch.empty(self._parameter.shape, device=device, dtype=dtype)
            setattr(self.owner, self.attribute, nn.Parameter(empty, requires_grad=False))
        return self._parameter[self.rows]


def _checkpoint_parameters(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Return every tensor that a checkpoint must have, by its name there."""
    for path, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            if isinstance(module, JoinedLinear):
                parent = path.rpartition(".")[0]
                for part, rows in module.part_rows():
                    yield f"{parent}.{part}.{attribute}", _Place(module, attribute, rows)
            else:
                yield f"{path}.{attribute}", _Place(module, attribute, slice(None))


def _kv_scales(model: nn.Module) -> dict[str, tuple[Attention, str]]:
    """Return every scale that a checkpoint may have, by its names there."""
    return {
        f"{path}.{name}": (module, attribute)
        for path, module in model.named_modules()
        if isinstance(module, Attention)
        for name, attribute in _SCALES.items()
    }


def _load_weights(
    model: DecoderForCausalLM, folder: Path, dtype: torch.dtype, device: torch.device
) -> None:
    missing = dict(_checkpoint_parameters(model))
    scales = _kv_scales(model)
    unknown: list[str] = []
    tied_head: Tensor | None = None
    for path, name, tensor in _read_weights(folder, model.config):
        if name in missing:
            place = missing.pop(name)
            _check_tensor(path, name, tensor, place.shape)
            # A copy, because the file's pages would otherwise stay the weight's memory.
            place.weight(device, dtype).copy_(tensor)
        elif name in scales:
            owner, attribute = scales[name]
            setattr(owner, attribute, _read_scale(path, name, tensor))
        elif name == "lm_head.weight" and model.lm_head is None:
            tied_head = tensor
        elif not name.endswith(_IGNORED_SUFFIXES):
            unknown.append(f"{name} in {path.name}")
    if missing:
        raise ModelLoadError(f"{folder}: weights are missing: {_first_of(missing)}")
    if unknown:
        raise ModelLoadError(f"{folder}: weights unknown to the model: {_first_of(unknown)}")
    if tied_head is not None:
        _check_tied(folder, model.model.embed_tokens.weight, tied_head)


def _read_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[Path, str, Tensor]]:
    """Read every tensor of a checkpoint, by its name there in Hugging Face layout."""
    gguf = folder / WEIGHTS
    if gguf.exists():
        return read_gguf(gguf, config)
    if config.quantization is None:
        return _read_tensors(_weight_files(folder))
    return read_quantized(_weight_files(folder), config.quantization)


def _weight_files(folder: Path) -> list[Path]:
    """List the safetensors files, each once; like Hugging Face, one file wins over an index."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise ModelLoadError(f"{folder}: no weights: neither {_SINGLE} nor {_INDEX}")
    weight_map = Fields.from_file(index).child("weight_map")
    shards = sorted({weight_map.text(name) for name in weight_map.names()})
    for shard in shards:
        # A name with a folder in it could point anywhere on this machine.
        if Path(shard).name != shard:
            raise ModelLoadError(f"{index}: weight_map: {shard!r} is not a file name")
        if not (folder / shard).exists():
            raise ModelLoadError(f"{folder / shard}: missing, but {_INDEX} names it")
    return [folder / shard for shard in shards]


def _read_tensors(paths: Iterable[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (the file object is no dict)
                    yield path, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error


def _check_tensor(path: Path, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        found, expected = list(tensor.shape), list(shape)
        raise ModelLoadError(f"{path}: {name}: shape {found}, but config.json means {expected}")
    if tensor.dtype not in _FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelLoadError(f"{path}: {name}: dtype {kind} is not supported (quantized weights?)")


def _read_scale(path: Path, name: str, tensor: Tensor) -> float:
    """Read the scale with which a layer's stored numbers are to be multiplied."""
    scale = float(tensor) if tensor.numel() == 1 else math.nan
    if not 0 < scale < math.inf:
        found = scale if tensor.numel() == 1 else f"shape {list(tensor.shape)}"
        raise ModelLoadError(f"{path}: {name}: must be one number above 0, got {found}")
    return scale


def _check_tied(folder: Path, embedding: Tensor, head: Tensor) -> None:
    """Raise ModelLoadError if a tied head was saved and is not what the embedding is."""
    same = head.shape == embedding.shape and torch.equal(
        head.to(device=embedding.device, dtype=embedding.dtype), embedding
    )
    if not same:
        problem = "differs from model.embed_tokens.weight although tie_word_embeddings is true"
        raise ModelLoadError(f"{folder}: lm_head.weight: {problem}")


def _first_of(names: Iterable[str]) -> str:
    ordered = list(names)
    more = len(ordered) - _SHOWN_NAMES
    shown = ", ".join(ordered[:_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown
