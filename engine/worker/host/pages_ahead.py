"""PagesAhead: touches the memory pages of never-used KV blocks while a node is idle.

The operating system allocates and clears a block's memory at the first write. This makes a prompt
up to a quarter slower, and a hand-off up to 40 times slower. A decode node has time to touch the
blocks that wait for KV while the prompt is computed. Refuses to know: which block goes to which
request.
"""

from __future__ import annotations

import ctypes
import logging

from torch import Tensor

from engine.worker.host.host_memory import read_host_memory

logger = logging.getLogger(__name__)

# Maximum number of bytes that are populated beyond the used and expected blocks, so that an idle
# node takes little memory.
AHEAD_BYTES = 2**26
SHARE = 8  # second limit: the machine's available memory divided by this number
STEP_BYTES = 2**21  # bytes of a huge page, populated at a time in less than a ms
_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE (Linux 5.14), missing in `mmap`


class PagesAhead:
    """Populates the memory of a KV cache whose blocks are first used in the order of their ids.

    Args:
        cache: KV cache, `[num_blocks, ...]`, from `allocate_kv_cache`; aligned to a page.
    """

    def __init__(self, cache: Tensor) -> None:
        self._cache, self._block_bytes = cache, cache[0].nbytes
        self._next = 0 if cache.is_cpu else cache.nbytes  # all bytes before this one are populated
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def find(self, num_used: int, num_expected_blocks: int = 0) -> bool:
        """Populate the next 2 MiB; return whether this method should be called again now.

        Blocks in use are populated, too, because they may still wait for their first bytes.

        Args:
            num_used: number of blocks that were ever used.
            num_expected_blocks: number of further blocks that may be filled at once, such as with
                KV from files.
        """
        used = num_used * self._block_bytes
        ahead = AHEAD_BYTES + num_expected_blocks * self._block_bytes
        size = min(STEP_BYTES, self._cache.nbytes - self._next)
        if size <= 0 or self._next >= used + ahead:
            return False
        if self._next - used >= read_host_memory().available // SHARE:
            return False
        if self._madvise(self._cache.data_ptr() + self._next, size, _POPULATE_WRITE):
            logger.info("memory is not populated ahead: madvise failed with %d", ctypes.get_errno())
            self._next = self._cache.nbytes
            return False
        self._next += size
        return True
