"""Allocates host memory in huge pages, which speed up long sequential and scattered reads.

Refuses to know: what is stored there.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2**21
_CHUNK = 64 * 2**20
_LINE = 64  # alignment of tensors in bytes: a cache line


def huge_pages(num_bytes: int) -> Tensor:
    """Allocate `[num_bytes]` bytes of zeros that begin at the start of a huge page.

    Linux provides the memory when it is first written, in huge pages if they are free and allowed.

    Raises:
        OSError, OverflowError: there is not enough memory.
    """
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -everything.data_ptr() % _HUGE_PAGE
    return everything[begin : begin + num_bytes]


class WeightMemory:
    """Allocates tensors one after another in huge pages.

    If torch allocated each tensor by itself, only the parts that cover whole huge pages would use
    them: about half of a tensor of a few MiB.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a tensor; the arguments are those of ``torch.empty``.

        Tensors are cut from large chunks. A chunk is freed when all its tensors are gone.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(*shape, dtype=dtype)
        if num_bytes > len(self._chunk):
            self._chunk = huge_pages(max(_CHUNK, num_bytes))
        tensor = self._chunk[:num_bytes].view(dtype).view(*shape)
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return tensor
