"""Reads a checkpoint's tensors one at a time; safetensors files are mapped.

A mapped file's pages are released after a tensor is used, so that memory never holds both the
file's content and the loaded weight. Refuses to know: modules, formats of quantized weights.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.api.errors import ModelLoadError
from baton.checkpoint.safetensors_header import read_header
from baton_kernels import CodeLayout, Float8Rows, GroupedIntegers

# a mapped tensor's pages are released whenever this many bytes of it have been used
_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        path: the file that holds the tensor.
        name: the tensor's name in Hugging Face layout.
        read: reads the tensor, dequantized if necessary; raises ModelLoadError.
        is_mapped: whether the tensor, when read, is a view of the mapped file.
        shape: the tensor's shape when read; None: known only after reading.
        read_integers: reads a weight that is stored in integers which kernels support, without
            dequantizing. None, or a function that returns None, for other tensors.
        read_float8: reads a weight that is stored in float8, without dequantizing. None, or a
            function that returns None, for other tensors.
    """

    path: Path
    name: str
    read: Callable[[], Tensor]
    is_mapped: bool = False
    shape: tuple[int, ...] | None = None
    read_integers: Callable[[], GroupedIntegers | None] | None = None
    read_float8: Callable[[], Float8Rows | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """Some rows of a layer's weight, or all of them.

    Attributes:
        first_row: index of the first of these rows within the weight.
        content: the rows, ``[n, ...]``.
        is_mapped: whether ``content`` is a view of a mapped file.
    """

    first_row: int
    content: Tensor | GroupedIntegers | Float8Rows
    is_mapped: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return the shape of these rows, ``[n, ...]``."""
        return (self.content if isinstance(self.content, Tensor) else self.content.numbers).shape

    @property
    def tensor(self) -> Tensor:
        """Return the rows as floating-point numbers, dequantized if necessary."""
        return self.content if isinstance(self.content, Tensor) else self.content.dequantized()

    def moved(self, rows: slice, first_row: int) -> WeightPart:
        """Return some of these rows as a part that begins at the weight's row ``first_row``."""
        if isinstance(self.content, Tensor):
            return WeightPart(first_row, self.content[rows], self.is_mapped)
        content = self.content.part(rows, None)
        assert content is not None, "no group is cut along its inputs"
        return WeightPart(first_row, content, self.is_mapped)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows in pieces, each with the index of its first row within the weight.

        A mapped piece's pages are released when the next piece is asked for.
        """
        tensor = self.tensor
        row_bytes = tensor[:1].numel() * tensor.itemsize
        num_rows = max(_PIECE_BYTES // max(row_bytes, 1), 1)
        first_row = self.first_row
        for rows in torch.split(tensor, num_rows):
            yield first_row, rows
            first_row += len(rows)
            if self.is_mapped:
                release_pages(rows)


def integers_alike(
    parts: Sequence[WeightPart],
) -> tuple[list[GroupedIntegers], CodeLayout | None]:
    """Return the integers of all parts, and their common layout.

    The list is empty if a part has no integers; the layout is None if layouts differ.
    """
    kept = [part.content for part in parts if isinstance(part.content, GroupedIntegers)]
    if len(kept) < len(parts):
        return [], None
    kept = GroupedIntegers.alike(kept)
    layouts = {one.layout for one in kept}
    return kept, layouts.pop() if len(layouts) == 1 else None


def float8_alike(parts: Sequence[WeightPart]) -> list[Float8Rows]:
    """Return the float8 rows of all parts; empty if a part is not float8, or groups differ."""
    kept = [part.content for part in parts if isinstance(part.content, Float8Rows)]
    cuts = {(one.group_size, one.scales.shape[1]) for one in kept}
    return kept if len(kept) == len(parts) and len(cuts) == 1 else []


def open_safetensors(paths: Iterable[Path], files: ExitStack) -> dict[str, StoredTensor]:
    """Map safetensors files until ``files`` is closed; return their tensors by name.

    Raises:
        ModelLoadError: a file is broken, or two files have the same tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        places = read_header(path)
        try:
            file: Any = files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        for name in file.keys():  # noqa: SIM118 (the file object is no dict)
            if name in tensors:
                raise ModelLoadError(f"{path}: {name}: also in {tensors[name].path.name}")
            read = functools.partial(_read_tensor, path, file, name)
            tensors[name] = StoredTensor(path, name, read, is_mapped=True, shape=places[name].shape)
    return tensors


def _read_tensor(path: Path, file: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error
    return tensor


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    return ModelLoadError(f"{path}: not a readable safetensors file: {error}")


def release_pages(tensor: Tensor) -> None:
    """Let the system drop a mapped tensor's pages from memory; the tensor is no longer needed."""
    madvise = _madvise()
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.itemsize
    size = (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and size > 0 and tensor.is_contiguous():
        madvise(begin, size, mmap.MADV_DONTNEED)  # a failure does no harm


@functools.cache
def _madvise() -> Any:
    """Return the C library's ``madvise``; None if it does not exist or cannot release pages."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
