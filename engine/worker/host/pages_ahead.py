"""PagesAhead: find memory for KV blocks that nobody has had yet, while a node idles.

The kernel gives a block its memory, and clears it, when it is first written. A prompt on such
blocks takes up to a quarter longer, and on both sides of a hand-off.
Refuses to know: who is given which block.
"""

from __future__ import annotations

import ctypes
import logging

from torch import Tensor

from engine.worker.host.host_memory import read_host_memory

logger = logging.getLogger(__name__)

AHEAD_BYTES = 2**26  # at most, beyond the used blocks: a node that serves little stays small
SHARE = 8  # at most this part of the memory that the machine has left
STEP_BYTES = 2**21  # a huge page, a fraction of a millisecond
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14; Python's mmap does not name it


class PagesAhead:
    """Find memory for one cache, whose blocks are given out for the first time in their order.

    Args:
        cache: `[num_blocks, ...]` as `allocate_kv_cache` gives it, from a page's beginning on.
    """

    def __init__(self, cache: Tensor) -> None:
        self._cache, self._block_bytes = cache, cache[0].nbytes
        self._next = 0 if cache.is_cpu else cache.nbytes  # bytes before this offset have memory
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def find(self, num_used: int) -> bool:
        """Find memory for the next 2 MiB; return whether there is more to do now.

        Args:
            num_used: blocks that any request has had.
        """
        used = num_used * self._block_bytes
        self._next = max(self._next, used // STEP_BYTES * STEP_BYTES)
        size = min(STEP_BYTES, self._cache.nbytes - self._next)
        if size <= 0 or self._next >= used + AHEAD_BYTES:
            return False
        if self._next - used >= read_host_memory().available // SHARE:
            return False
        if self._madvise(self._cache.data_ptr() + self._next, size, _POPULATE_WRITE):
            logger.info("no memory is found ahead: madvise fails with %d", ctypes.get_errno())
            self._next = self._cache.nbytes
            return False
        self._next += size
        return True
