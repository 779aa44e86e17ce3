"""Sets up glibc's allocator on Linux, so that it keeps freed memory for the next step.

Refuses to know: models, steps, caches.
"""

from __future__ import annotations

import ctypes
import mmap

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # parameter numbers of mallopt(3)
_HUGE_PAGE = 2**21
KEPT_BYTES = 2**30
_ROOM = KEPT_BYTES // 2  # maximum number of free bytes at the heap's end that glibc keeps


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, and get new memory in huge pages.

    By default, glibc gives the memory of activations (some MiB) back to the kernel after each
    layer, and gets new pages for the next layer. Clearing these pages takes the kernel up to a
    tenth of a prompt's time. After this call, glibc keeps up to `KEPT_BYTES` of free memory at the
    heap's end. Has no effect with other C libraries (musl, macOS).

    Returns:
        Whether the allocator could be set up.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
    except AttributeError:
        return False
    malloc.restype = ctypes.c_void_p
    malloc.argtypes, free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Use one heap for all threads: a heap of one thread is small, and is given back when it is
    # empty.
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES)):
        if not mallopt(option, value):
            return False
    # Reserve this much address space at the heap's end; memory that is never written takes no
    # pages.
    room = malloc(_ROOM)
    if not room:
        return False
    begin = -(-room // _HUGE_PAGE) * _HUGE_PAGE
    end = (room + _ROOM) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # only advice, so a failure is no error
    free(room)
    return True
