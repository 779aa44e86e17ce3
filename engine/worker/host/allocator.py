"""The C library's allocator: what one step frees, the next one wants again. Linux with glibc.

Refuses to know: models, steps, caches.
"""

from __future__ import annotations

import ctypes
import mmap

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of mallopt(3)
_HUGE_PAGE = 2**21
KEPT_BYTES = 2**30
_ROOM = KEPT_BYTES // 2  # more that is free at once would be given back


def keep_freed_memory() -> bool:
    """Have freed memory stay in the process, and new memory come in huge pages.

    As it is, activations of some MiB are given back and come as new pages, which the kernel clears,
    layer after layer: a tenth of the time of some prompts. Up to `KEPT_BYTES` that are free at the
    heap's end stay there. A C library that cannot do so (musl, macOS) stays as it is.

    Returns:
        whether it could.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
    except AttributeError:
        return False
    malloc.restype = ctypes.c_void_p
    malloc.argtypes, free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # One heap for all threads: those of their own hold little, and are given back as they empty.
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES)):
        if not mallopt(option, value):
            return False
    # The heap grows by so much address space, and keeps it: memory that was asked for and never
    # written is none.
    room = malloc(_ROOM)
    if not room:
        return False
    begin = -(-room // _HUGE_PAGE) * _HUGE_PAGE
    end = (room + _ROOM) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # a wish
    free(room)
    return True
