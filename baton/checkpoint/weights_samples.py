"""Weights samples: parts of a weights file that suffice to tell fine-tuned models apart.

a file of at most 64 MiB      the whole file
larger, safetensors or GGUF   the header, each small tensor, three samples of each large tensor
larger, of another format     64 KiB of every 4 MiB
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import MAGIC, GgufFile
from baton.checkpoint.gguf.parts import part_files, read_places
from baton.checkpoint.safetensors_header import header_of

WHOLE_FILE_BYTES = 64 * 2**20
SMALL_TENSOR_BYTES, TENSOR_SAMPLE_BYTES = 2**18, 2**14
SAMPLE_BYTES, SAMPLE_EVERY_BYTES = 2**16, 2**22
_CHUNK_BYTES = 2**20


def read_samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield, in order, the bytes sampled from a file of ``size`` bytes; raises OSError."""
    for begin, end in _ranges(file, size):
        file.seek(begin)
        for at in range(begin, end, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, end - at))


def _ranges(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    if size <= WHOLE_FILE_BYTES:
        yield 0, size
        return
    tensors = _tensors(file, size)
    if not tensors:
        for begin in (*range(0, size, SAMPLE_EVERY_BYTES), size - SAMPLE_BYTES):
            yield begin, begin + SAMPLE_BYTES
        return
    yield 0, min(begin for begin, _ in tensors)
    for begin, end in tensors:
        if end - begin <= SMALL_TENSOR_BYTES:
            yield begin, end
            continue
        for at in (begin, (begin + end) // 2, end - TENSOR_SAMPLE_BYTES):
            yield at, at + TENSOR_SAMPLE_BYTES


def _tensors(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each tensor of a safetensors or GGUF file; empty for other files."""
    if file.read(len(MAGIC)) == MAGIC:
        try:
            path = Path(file.name)
            read = read_places if part_files(path) == [path] else GgufFile.read
            stored = read(path).tensors.values()
        except ModelLoadError:
            return []  # loading the file will report the error
        return sorted((tensor.start, tensor.start + tensor.num_bytes) for tensor in stored)
    try:
        return sorted((place.begin, place.end) for place in header_of(file, size).values())
    except ValueError:
        return []  # loading the file will report the error
