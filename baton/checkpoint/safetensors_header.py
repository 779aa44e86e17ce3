"""Safetensors headers: read the header of a file, and check the header against the file's size.

Format: https://huggingface.co/docs/safetensors. Does not know the meaning of tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from baton.api.bounded_files import parse_object, size_of
from baton.api.errors import ModelLoadError

_LENGTH_BYTES = 8  # bytes of the header's length, at the file's start
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_SIZE = 2**48  # largest dimension
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of a tensor in its file, in bytes from the file's start.

    Attributes:
        dtype: dtype of the tensor, by its name in the format.
    """

    shape: tuple[int, ...]
    begin: int
    end: int
    dtype: str


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Return the positions of a file's tensors, by name.

    Raises:
        ModelLoadError: the file cannot be read or is broken; the error names file and field.
    """
    size = size_of(path)
    try:
        with path.open("rb") as file:
            return header_of(file, size)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error


def header_of(
    file: BinaryIO, size: int, max_header_bytes: int = _MAX_HEADER_BYTES
) -> dict[str, TensorPlace]:
    """Return the positions of an open file's tensors, by name.

    Raises:
        OSError: the file cannot be read.
        ValueError: header and file contradict each other; the error has the reason, in one line.
    """
    file.seek(0)
    start = file.read(_LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES:
        raise ValueError(f"truncated: {size} bytes")
    (length,) = struct.unpack("<Q", start)
    most = min(max_header_bytes, size - _LENGTH_BYTES)
    if length > most:
        raise ValueError(f"header: must have at most {most} bytes, got {length}")
    base = _LENGTH_BYTES + length
    header = parse_object(file.read(length))
    places = {
        name: _place(name, described, base, size)
        for name, described in header.items()
        if name != "__metadata__"
    }
    _refuse_overlaps(places)
    return places


def _place(name: str, described: Any, base: int, size: int) -> TensorPlace:
    if not name.isprintable():
        raise ValueError(f"a tensor's name is not printable: {name!r:.100}")
    if not isinstance(described, dict):
        raise ValueError(f"{name}: expected an object, found {described!r:.60}")
    dtype: Any = described.get("dtype")
    shape: Any = described.get("shape")
    offsets: Any = described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name}: dtype: {dtype!r:.60} is not known")
    if not _are_sizes(shape):
        raise ValueError(f"{name}: shape: must be sizes up to 2**48, got {shape!r:.60}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name}: data_offsets: must be two rising numbers, got {offsets!r:.60}")
    begin, end = base + offsets[0], base + offsets[1]
    if end > size:
        raise ValueError(f"{name}: data_offsets: ends at byte {end}, the file has {size}")
    if (end - begin) * 8 != prod(shape) * _BITS[dtype]:
        raise ValueError(f"{name}: data_offsets: {end - begin} bytes cannot be {shape} of {dtype}")
    return TensorPlace(tuple(shape), begin, end, dtype)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_SIZE for value in values
    )


def _refuse_overlaps(places: dict[str, TensorPlace]) -> None:
    ordered = sorted(places.items(), key=lambda item: (item[1].begin, item[1].end))
    for (name, one), (other, after) in pairwise(ordered):
        if after.begin < one.end:
            raise ValueError(f"{other}: data_offsets: overlaps {name}")
