"""Read the header of a GGUF file with a LoRA adapter, as llama.cpp's converter writes it.

    general.type           "adapter"
    adapter.type           "lora"
    adapter.lora.alpha     numerator of all scales; 0: all scales are 1
    general.architecture   architecture of the base model, which decides names and orders

    blk.0.attn_q.weight.lora_a           [rank, inputs]
    blk.0.attn_q.weight.lora_b           [outputs, rank], rows reordered as in the base model's file
    blk.0.ffn_up_exps.weight.lora_a      [experts, rank, inputs]
    blk.0.ffn_up_exps.weight.lora_b      [experts, outputs, rank]
    token_embd.weight.lora_a             [vocabulary, rank]

Refuses to know: torch, tensors' content, the shape of a base model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from baton.adapters.config import MAX_ALPHA, MAX_RANK
from baton.adapters.digest import AdapterError
from baton.adapters.modules import (
    AdaptedModule,
    AdapterFiles,
    AdapterTensor,
    Layout,
    check_numbers,
    modules_by_name,
    shown_shape,
    wrong_tensor,
)
from baton.api.errors import ModelLoadError
from baton.checkpoint.families import FAMILIES
from baton.checkpoint.gguf.architecture import EXPERT, LAYER, Architecture, Change
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile, StoredTensor
from baton.checkpoint.gguf.table import ARCHITECTURES

GGUF = ".gguf"
ANY_EXPERT = "*"  # stands for the expert number in the names of stacked layers
_A, _B = ".lora_a", ".lora_b"
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>\w+)\.weight")
_EMBEDDING = "token_embd"
_MAX_HEADER_BYTES = 16 * 2**20
_MAX_TENSORS = 200_000
# Changes that a GGUF converter may have made to an adapter: to the rows of B, to the columns of A.
_CHANGES_OF_B = (
    Change.QUERY_HALVES, Change.KEY_HALVES, Change.VALUE_HEADS, Change.VALUE_CHANNELS,
)  # fmt: skip
_CHANGES_OF_A = (Change.VALUE_COLUMNS,)
# Architecture -> another family whose GGUF files also name this architecture.
_SHARED = {"llama": "mistral"}


def open_gguf(path: Path) -> AdapterFiles:
    """Read an adapter's settings, and its tensors' names and shapes, from a GGUF file.

    Raises:
        AdapterError: the file cannot be read, or is not supported.
    """
    try:
        file = GgufFile.read(path, max_header_bytes=_MAX_HEADER_BYTES)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    architecture, alpha = _architecture(file), _alpha(file)
    if not 0 < len(file.tensors) <= _MAX_TENSORS:
        problem = f"must have 1 to {_MAX_TENSORS} tensors, got {len(file.tensors)}"
        raise AdapterError(f"{path}: {problem}")
    pairs: dict[str, dict[str, AdapterTensor]] = {}
    for name, place in file.tensors.items():
        kind = name[-len(_A) :]
        if kind not in (_A, _B):
            raise wrong_tensor(path, name, f"is no LoRA tensor: must end in {_A} or {_B}")
        pairs.setdefault(name.removesuffix(kind), {})[kind] = _tensor(path, name, place)
    row = ARCHITECTURES.load(architecture)[architecture]
    modules = [_module(path, row, alpha, name, parts) for name, parts in pairs.items()]
    return AdapterFiles(path, modules_by_name(path, modules), gguf_architecture=architecture)


def models_of(architecture: str) -> frozenset[str]:
    """Return the names in config.json of the models whose GGUF files name this architecture."""
    shared = _SHARED.get(architecture)
    return frozenset(
        model
        for family, names in FAMILIES.items()
        if architecture in names.gguf or family == shared
        for model in names.models
    )


def _architecture(file: GgufFile) -> str:
    """Return the base model's architecture; raises AdapterError unless the file is an adapter."""
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := file.metadata.get(key)) != expected:
            problem = f"{key}: must be {expected} in an adapter, got {found!r:.60}"
            raise AdapterError(f"{file.path}: {problem}")
    for key in file.metadata:
        if key.startswith("adapter.") and key not in ("adapter.type", "adapter.lora.alpha"):
            raise AdapterError(f"{file.path}: {key:.80}: is not supported")
    found = file.metadata.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES.names():
        known = ", ".join(sorted(ARCHITECTURES.names()))
        problem = f"{found!r:.60} is not supported; supported: {known}"
        raise AdapterError(f"{file.path}: general.architecture: {problem}")
    return found


def _alpha(file: GgufFile) -> float:
    value = file.metadata.get("adapter.lora.alpha", 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_ALPHA:  # false for NaN
        problem = f"must be a number up to {MAX_ALPHA:g}, got {value!r:.60}"
        raise AdapterError(f"{file.path}: adapter.lora.alpha: {problem}")
    return float(value)


def _tensor(path: Path, name: str, place: StoredTensor) -> AdapterTensor:
    dtype = TENSOR_TYPES[place.type_id].name
    tensor = AdapterTensor(name, dtype, place.shape, place.start, place.num_bytes)
    check_numbers(path, tensor)
    return tensor


def _module(
    path: Path, row: Architecture, alpha: float, stored: str, parts: Mapping[str, AdapterTensor]
) -> AdaptedModule:
    """Make an adapted layer from its A and B; check that neither is missing and they fit."""
    for kind in (_A, _B):
        if kind not in parts:
            raise wrong_tensor(path, f"{stored:.200}{kind}", "is missing")
    a, b = parts[_A], parts[_B]
    name, changes = _meaning(path, row, stored)
    is_stacked, is_embedding = ANY_EXPERT in name.split("."), stored == f"{_EMBEDDING}.weight"
    num_dims = 3 if is_stacked else 2
    if len(a.shape) != num_dims or len(b.shape) != num_dims:
        problem = f"shapes {shown_shape(a.shape)} and {shown_shape(b.shape)}, but this layer's"
        raise wrong_tensor(path, a, f"{problem} have {num_dims} dimensions")
    rank = a.shape[-1] if is_embedding else a.shape[-2]
    if b.shape[-1] != rank or not 1 <= rank <= MAX_RANK:
        problem = f"shapes {shown_shape(a.shape)} and {shown_shape(b.shape)} mean no rank"
        raise wrong_tensor(path, a, f"{problem} of 1 to {MAX_RANK}")
    if is_stacked and a.shape[0] != b.shape[0]:
        problem = f"{a.shape[0]} experts, but lora_b has {b.shape[0]}"
        raise wrong_tensor(path, a, problem)
    layout = Layout.TURNED if is_embedding else Layout.PLAIN
    return AdaptedModule(
        name=name,
        scale=alpha / rank if alpha else 1.0,
        rank=rank,
        a=a,
        b=b,
        layout=Layout.EXPERTS_STACKED if is_stacked else layout,
        num_experts=a.shape[0] if is_stacked else None,
        is_embedding=is_embedding,
        changes=changes,
    )


def _meaning(path: Path, row: Architecture, stored: str) -> tuple[str, tuple[Change, ...]]:
    """Return a layer's name in Hugging Face layout, and what the converter did to its weight."""
    found = _NAME.fullmatch(stored)
    if found is None:
        raise wrong_tensor(path, stored, "is no name of a weight")
    layer, part = found["layer"], found["part"]
    for target, joined in row.joins:
        if layer is not None and f"{part}.weight" in joined:
            whole = (row.prefix + target).replace(LAYER, layer).removesuffix(".weight")
            problem = (
                f"is a part of {whole}, which can be adapted only as a whole, in PEFT's layout"
            )
            raise wrong_tensor(path, stored, problem)
    name = row.outer_name(part) if layer is None else row.inner_name(part, ".weight")
    if name is None:
        raise wrong_tensor(path, stored, "this architecture has no such weight")
    changes = row.changes_of(part, ".weight")
    for change in changes:
        if change not in _CHANGES_OF_A and change not in _CHANGES_OF_B:
            raise wrong_tensor(path, stored, "weights that a converter changes cannot be adapted")
    name = name.removesuffix(".weight").replace(EXPERT, ANY_EXPERT)
    return name if layer is None else name.replace(LAYER, layer), changes
