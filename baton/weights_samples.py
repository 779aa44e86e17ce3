"""Which bytes of a file of weights stand for all of them: two fine-tunes of one model must differ.

a file of at most 64 MiB      all of it
larger                        64 KiB of every 4 MiB, so something of every large tensor
larger, and of safetensors    its header, and all small tensors too: norms and biases
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

WHOLE_FILE_BYTES = 64 * 2**20
SAMPLE_BYTES, SAMPLE_EVERY_BYTES = 2**16, 2**22
SMALL_TENSOR_BYTES = 2**20
_MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8  # of safetensors' header, in front of it


def read_samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The bytes that stand for a file of ``size`` bytes, in order; raises OSError."""
    every = SAMPLE_BYTES if size <= WHOLE_FILE_BYTES else SAMPLE_EVERY_BYTES
    for begin in range(0, size, every):
        file.seek(begin)
        yield file.read(SAMPLE_BYTES)
    if size > WHOLE_FILE_BYTES:
        file.seek(max(0, size - SAMPLE_BYTES))
        yield file.read(SAMPLE_BYTES)
        yield from _small_tensors(file, size)


def _small_tensors(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The header and the small tensors of safetensors; nothing of a file of another kind."""
    file.seek(0)
    num_header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if num_header_bytes > min(_MAX_HEADER_BYTES, size):
        return
    header = file.read(num_header_bytes)
    try:
        tensors = json.loads(header)
        ranges = [
            (int(begin), int(end))
            for name, tensor in tensors.items()
            if name != "__metadata__"
            for begin, end in [tensor["data_offsets"]]
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # who loads it will say what is wrong
    yield header
    for begin, end in sorted(ranges):
        if 0 < end - begin <= SMALL_TENSOR_BYTES:
            file.seek(_LENGTH_BYTES + num_header_bytes + max(begin, 0))
            yield file.read(end - begin)
