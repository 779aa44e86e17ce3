"""GGUF files: read metadata and tensor positions, and check them against the file's size.

The `gguf` package is not used, because it takes seconds and gigabytes to read a vocabulary, and
needs numpy. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows neither the
meaning of metadata nor the contents of tensors.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from typing import Any

from baton.api.bounded_files import size_of
from baton.api.errors import ModelLoadError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 2**16
_MAX_DIMENSIONS = 4
_SHOWN_TYPES = 3

# Number of a metadata type -> code of the `struct` module. Types 8 (text) and 9 (array) have none.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type in which GGUF stores tensors: blocks of some values, each of some bytes."""

    name: str
    values_per_block: int
    bytes_per_block: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The storage type, shape and position of a tensor in a GGUF file."""

    path: Path  # the file that contains the tensor
    type_id: int  # a key of TENSOR_TYPES
    shape: tuple[int, ...]  # rows first; the file stores dimensions in reverse
    start: int  # offset in bytes from the file's start
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF model: everything that precedes the tensors' contents.

    Attributes:
        path: the GGUF file, or the first part of a divided model.
        metadata: the file's metadata, by key.
        tensors: types and positions of the tensors in all parts, by name.
        header_bytes: offset at which the tensors' contents begin in the file ``path``.
        parts: the files that form the model, in order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    header_bytes: int
    parts: tuple[Path, ...]

    @classmethod
    def read(cls, path: Path, *, max_header_bytes: int | None = None) -> GgufFile:
        """Read a file's header.

        Args:
            max_header_bytes: limit of the header's size; None: the header may be as long as the
                file.

        Raises:
            ModelLoadError: the file is no GGUF, truncated or unsupported.
        """
        size_of(path)
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                return _read(path, content, max_header_bytes)
        except _BadFileError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        except ValueError as error:  # raised by mmap for an empty file
            raise ModelLoadError(f"{path}: no GGUF file: {error}") from error
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the values of a small F32 tensor; raises ModelLoadError for another type."""
        tensor = self.tensors[name]
        if TENSOR_TYPES[tensor.type_id].name != "F32":
            found = TENSOR_TYPES[tensor.type_id].name
            raise ModelLoadError(f"{self.path}: {name}: must be F32, got {found}")
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return struct.unpack(f"<{prod(tensor.shape)}f", file.read(tensor.num_bytes))


class _BadFileError(Exception):
    """The file is invalid; the message says why."""


class _Cursor:
    """A position in a file, from which consecutive little-endian values are read."""

    def __init__(self, content: mmap.mmap, max_bytes: int | None = None) -> None:
        self.content = content
        self.position = 0
        self._end = len(content) if max_bytes is None else min(max_bytes, len(content))

    def scalar(self, code: str) -> Any:
        start = self._take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.content, start)[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self._take(length)
        try:
            return self.content[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise _BadFileError(f"a text at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _BadFileError(f"metadata of unknown type {kind} at byte {self.position}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self._texts(length)
        if kind not in _SCALARS:
            raise _BadFileError(f"an array of type {kind} at byte {self.position}")
        code = f"<{length}{_SCALARS[kind]}"
        self._check(length)
        return list(struct.unpack_from(code, self.content, self._take(struct.calcsize(code))))

    def _texts(self, number: int) -> list[str]:
        """Read ``number`` texts in one loop, because most of a header is a vocabulary's texts."""
        self._check(number * 8)  # a text takes at least the 8 bytes of its length
        content, position, size = self.content, self.position, self._end
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(number):
                (length,) = length_at(content, position)
                position += 8 + length
                if length > size:
                    break
                texts.append(content[position - length : position].decode())
        except (UnicodeDecodeError, struct.error) as error:
            problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "truncated"
            raise _BadFileError(f"{problem}: a text that ends at byte {position}") from error
        self.position = position
        self._check(0)
        return texts

    def _take(self, num_bytes: int) -> int:
        """Advance by ``num_bytes``; return the position before."""
        self._check(num_bytes)
        start = self.position
        self.position += num_bytes
        return start

    def _check(self, num_bytes: int) -> None:
        needed, size = self.position + num_bytes, len(self.content)
        if needed > size:
            raise _BadFileError(f"truncated: needs {needed} bytes, the file has {size}")
        if needed > self._end:
            raise _BadFileError(f"header: must have at most {self._end} bytes, needs {needed}")


def _read(path: Path, content: mmap.mmap, max_header_bytes: int | None) -> GgufFile:
    if content[:4] != MAGIC:
        raise _BadFileError("no GGUF file: does not begin with GGUF")
    cursor = _Cursor(content, max_header_bytes)
    cursor.position = len(MAGIC)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        # In a big-endian file the version's bytes are reversed.
        order = "big-endian" if version % (1 << 16) == 0 else f"GGUF version {version}"
        raise _BadFileError(f"{order} is not supported; supported: versions 2 and 3, little-endian")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = _printable(cursor.text())
        if key in metadata:
            raise _BadFileError(f"{key:.100}: is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    stored = list(_tensor_places(cursor, num_tensors))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        problem = f"must be a number from 1 to {_MAX_ALIGNMENT}, got {alignment!r:.100}"
        raise _BadFileError(f"general.alignment: {problem}")
    start = -(-cursor.position // alignment) * alignment
    _refuse_unknown_types({name: type_id for name, type_id, _, _ in stored})
    tensors = {}
    for name, type_id, shape, offset in stored:
        kind = TENSOR_TYPES[type_id]
        if shape[-1] % kind.values_per_block:
            raise _BadFileError(f"{name}: rows of {shape[-1]} values do not fit {kind.name} blocks")
        if name in tensors:
            raise _BadFileError(f"{name}: is there twice")
        num_bytes = prod(shape) // kind.values_per_block * kind.bytes_per_block
        tensors[name] = StoredTensor(path, type_id, shape, start + offset, num_bytes)
        if start + offset + num_bytes > len(content):
            raise _BadFileError(
                f"truncated: {name} ends at byte {start + offset + num_bytes}, the file has "
                f"{len(content)}"
            )
    _refuse_overlaps(tensors)
    return GgufFile(path, metadata, tensors, start, (path,))


def _refuse_overlaps(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes, which would let a small file fill any amount of memory."""
    ordered = sorted(tensors.items(), key=lambda item: item[1].start)
    for (name, one), (other, after) in pairwise(ordered):
        if after.start < one.start + one.num_bytes:
            raise _BadFileError(f"{other}: overlaps {name}")


def _printable(name: str) -> str:
    """Return a name unchanged; raises _BadFileError if error messages cannot show it."""
    if not name.isprintable():
        raise _BadFileError(f"a name is not printable: {name!r:.100}")
    return name


def _tensor_places(cursor: _Cursor, number: int) -> Iterator[tuple[str, int, tuple[int, ...], int]]:
    """Yield (name, type, shape, offset) of each tensor."""
    for _ in range(number):
        name, num_dimensions = _printable(cursor.text()), cursor.scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _BadFileError(f"{name}: {num_dimensions} dimensions are not supported")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
        if not all(shape):
            raise _BadFileError(f"{name}: a tensor without values")
        yield name, cursor.scalar("I"), shape, cursor.scalar("Q")


def _refuse_unknown_types(type_ids: Mapping[str, int]) -> None:
    unknown = [name for name, type_id in type_ids.items() if type_id not in TENSOR_TYPES]
    if unknown:
        shown = ", ".join(f"{name} ({type_ids[name]})" for name in islice(unknown, _SHOWN_TYPES))
        known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        raise _BadFileError(f"quantization of {shown} is not supported; supported: {known}")
