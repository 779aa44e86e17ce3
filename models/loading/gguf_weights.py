"""Reads a GGUF file's tensors one at a time, under Hugging Face's names.

Refuses to know: modules, the model's dtype, metadata and names (`baton/checkpoint/gguf`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.architecture import (
    EXPERT,
    FUSED_PARTS,
    LAYER,
    Architecture,
    Change,
    Keys,
)
from baton.checkpoint.gguf.file import TENSOR_TYPES, GgufFile
from baton.checkpoint.gguf.file import StoredTensor as Place
from baton.checkpoint.gguf.parts import linked, read_places
from baton.checkpoint.gguf.rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from baton.checkpoint.gguf.table import architecture_of
from baton_kernels import GroupedIntegers
from models.config import ModelConfig
from models.loading.gguf_blocks import unpack_blocks
from models.loading.gguf_changes import changed, is_order, joined, needed
from models.loading.stored_weights import StoredTensor

_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<part>.+?)(?P<kind>\.weight|\.bias)?")
_IN_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_QKV = "attn_qkv"
_SIXTEEN_BITS = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in Hugging Face layout, and the GGUF file's tensors that it is made from.

    Attributes:
        name: the name in Hugging Face layout.
        parts: the file's tensors, which are stacked along their rows.
        changes: converters' changes to undo after stacking, in order.
    """

    name: str
    parts: tuple[Place, ...]
    changes: tuple[Change, ...] = ()


def read_gguf(path: Path, config: ModelConfig) -> Iterator[StoredTensor]:
    """Yield every tensor of a GGUF file.

    A quantized tensor is read as float32, with the values of `gguf.dequantize`, or as grouped
    integers; a tensor of 16 bits keeps its type.

    Raises:
        ModelLoadError: the file is broken, or the `gguf` package is not installed.
    """
    try:
        import gguf  # imported here, because few checkpoints need gguf
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{path}: {error.name} is not installed; a node needs: pip install 'baton-serve[node]'"
        ) from error

    file = read_places(linked(path))
    contents = {part: numpy.memmap(part, mode="r") for part in file.parts}

    def content(place: Place) -> Any:
        return contents[place.path][place.start : place.start + place.num_bytes]

    def dequantized(place: Place) -> Tensor:
        blocks = content(place)
        sixteen_bits = _SIXTEEN_BITS.get(TENSOR_TYPES[place.type_id].name)
        if sixteen_bits is not None:
            numbers = torch.from_numpy(blocks.view(numpy.int16).copy())
            return numbers.view(sixteen_bits).view(place.shape)
        rows = blocks.reshape(*place.shape[:-1], -1)  # [..., bytes of a row]
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType(place.type_id))
        # a copy, because the loader cannot release pages of this mapped file
        return torch.from_numpy(numpy.array(values)).view(place.shape)

    def read(tensor: _Tensor) -> Tensor:
        try:
            return joined([dequantized(one) for one in tensor.parts], tensor.changes, config)
        except ValueError as error:
            raise ModelLoadError(f"{tensor.parts[0].path}: {tensor.name}: {error}") from error

    def read_integers(tensor: _Tensor) -> GroupedIntegers | None:
        found = _integers(tensor.parts, [content(one) for one in tensor.parts])
        if found is None or not is_order(tensor.changes):
            return None

        def in_order(one: Tensor) -> Tensor:
            return changed(one, tensor.changes, config)

        return replace(found, numbers=in_order(found.numbers), groups=found.groups.map(in_order))

    for tensor in _Tensors(file, config).all():
        yield StoredTensor(
            tensor.parts[0].path,
            tensor.name,
            functools.partial(read, tensor),
            shape=_shape(tensor),
            read_integers=functools.partial(read_integers, tensor),
        )


def _shape(tensor: _Tensor) -> tuple[int, ...] | None:
    """Return the shape that a tensor will have when it is read; None: only reading will tell."""
    inner = {part.shape[1:] for part in tensor.parts}
    if len(inner) > 1 or not is_order(tensor.changes):
        return None
    return (sum(part.shape[0] for part in tensor.parts), *inner.pop())


def _integers(parts: Sequence[Place], contents: Sequence[Any]) -> GroupedIntegers | None:
    """Unpack and stack quantized matrices; None: the types differ, or have no integers."""
    kinds = {(part.type_id, part.shape[1:]) for part in parts}
    if len(kinds) > 1 or len(parts[0].shape) != 2:
        return None
    kind = TENSOR_TYPES[parts[0].type_id]
    num_rows, num_columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    blocks = torch.from_numpy(numpy.concatenate(contents))
    found = unpack_blocks(kind.name, blocks.view(num_rows, -1, kind.bytes_per_block))
    if found is None or found.numbers.shape != (num_rows, num_columns):
        return None
    return found


class _Tensors:
    """The tensors in Hugging Face layout that a GGUF file contains."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._row: Architecture = architecture_of(file)
        self._num_layers = Keys.of(file).num_layers()

    def all(self) -> Iterator[_Tensor]:
        """Yield every tensor. An unknown tensor keeps its name, so that the loader reports it."""
        for name, place in self._file.tensors.items():
            found = _NAME.fullmatch(name)
            if name in _IN_CONFIG or found is None:
                continue
            layer, part, kind = found["layer"], found["part"], found["kind"] or ""
            if layer is None:
                outer = self._row.outer_name(part)
                changes = self._row.changes_of(part, kind)
                yield _Tensor(name if outer is None else outer + kind, (place,), changes)
            elif int(layer) < self._num_layers:  # later layers are MTP layers, which are not read
                yield from self._of_layer(name, place, (layer, part, kind))

    def _of_layer(self, name: str, place: Place, words: tuple[str, str, str]) -> Iterator[_Tensor]:
        layer, part, kind = words
        for target, parts in self._row.joins:
            places = [self._file.tensors.get(f"blk.{layer}.{one}") for one in parts]
            found = tuple(one for one in places if one is not None)
            if part + kind in parts and len(found) == len(parts):
                if part + kind == parts[0]:
                    changes = needed(self._row.changes_of(target, ""), self._config)
                    full = (self._row.prefix + target).replace(LAYER, layer)
                    yield _Tensor(full, found, changes)
                return
        stacked = self._row.inner_name(part, kind)
        if stacked is None and part in FUSED_PARTS:
            for one, rows in self._cut(name, place, part):
                yield from self._named(name, rows, (layer, one, kind))
        elif stacked is not None and EXPERT in stacked:
            yield from self._named(name, list(_stacked(place)), words)
        else:
            yield from self._named(name, (place,), words)

    def _named(
        self, name: str, places: Sequence[Place], words: tuple[str, str, str]
    ) -> Iterator[_Tensor]:
        """Yield a tensor under its Hugging Face name; for experts, one tensor per expert."""
        layer, part, kind = words
        changes = needed(self._row.changes_of(part, kind), self._config)
        full = self._row.inner_name(part, kind)
        if full is None:
            yield _Tensor(name, tuple(places))
            return
        full = full.replace(LAYER, layer)
        if EXPERT not in full:
            yield _Tensor(full, tuple(places), changes)
            return
        for expert, place in enumerate(places):
            yield _Tensor(full.replace(EXPERT, str(expert)), (place,), changes)

    def _cut(self, name: str, place: Place, part: str) -> Iterator[tuple[str, list[Place]]]:
        """Cut a fused tensor of the layer or of each expert; yield each part's name and rows."""
        parts = FUSED_PARTS[part]
        wholes = [place] if part == _QKV else list(_stacked(place))
        num_rows = wholes[0].shape[0]
        sizes = [num_rows // len(parts)] * len(parts)
        if part == _QKV:
            config = self._config
            heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            sizes = [number * config.head_dim for number in heads]
        if sum(sizes) != num_rows or wholes[0].num_bytes % num_rows:
            expected = f"{' + '.join(map(str, sizes))} rows"
            problem = f"shape {list(place.shape)}, but config.json means {expected}"
            raise ModelLoadError(f"{place.path}: {name}: {problem}")
        first = 0
        for one, size in zip(parts, sizes, strict=True):
            yield one, [_rows(whole, first, size) for whole in wholes]
            first += size


def _stacked(place: Place) -> Iterator[Place]:
    """Yield one tensor per expert of a stacked tensor; yield a vector unchanged."""
    if len(place.shape) < 2:
        yield place
        return
    count, size = place.shape[0], place.num_bytes // place.shape[0]
    for expert in range(count):
        start = place.start + expert * size
        yield replace(place, shape=place.shape[1:], start=start, num_bytes=size)


def _rows(place: Place, first: int, number: int) -> Place:
    size = place.num_bytes // place.shape[0]
    start, shape = place.start + first * size, (number, *place.shape[1:])
    return replace(place, shape=shape, start=start, num_bytes=number * size)
