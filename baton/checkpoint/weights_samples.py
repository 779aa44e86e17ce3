"""Which bytes of a file of weights stand for all of them: two fine-tunes of one model must differ.

a file of at most 64 MiB     all of it
larger, safetensors or GGUF   its header; of each tensor all, or where it is large three samples
larger, of another kind      64 KiB of every 4 MiB
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import MAGIC, GgufFile

WHOLE_FILE_BYTES = 64 * 2**20
SMALL_TENSOR_BYTES, TENSOR_SAMPLE_BYTES = 2**18, 2**14
SAMPLE_BYTES, SAMPLE_EVERY_BYTES = 2**16, 2**22
_CHUNK_BYTES = 2**20
_MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8  # of safetensors' header, in front of it


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
    """Locate the tensors of a safetensors file; a file of another kind has none."""
    if file.read(len(MAGIC)) == MAGIC:
        try:
            stored = GgufFile.read(Path(file.name)).tensors.values()
        except ModelLoadError:
            return []  # who loads it will say what is wrong
        return sorted((tensor.start, tensor.start + tensor.num_bytes) for tensor in stored)
    file.seek(0)
    num_header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if num_header_bytes > min(_MAX_HEADER_BYTES, size):
        return []
    base = _LENGTH_BYTES + num_header_bytes
    try:
        header = json.loads(file.read(num_header_bytes))
        return sorted(
            (base + max(int(begin), 0), base + int(end))
            for name, tensor in header.items()
            if name != "__metadata__"
            for begin, end in [tensor["data_offsets"]]
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []  # who loads it will say what is wrong
