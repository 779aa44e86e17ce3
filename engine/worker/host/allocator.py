"""The C library's allocator: keeps freed memory for the next step. Linux with glibc.

Refuses to know: models, steps, caches.
"""

from __future__ import annotations

import ctypes
import mmap

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # parameters of mallopt(3)
_HUGE_PAGE = 2**21
KEPT_BYTES = 2**30
_ROOM = KEPT_BYTES // 2  # maximum number of free bytes at the heap's end that glibc keeps


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, and get new memory in huge pages.

    By default, glibc gives back activations of some MiB after each layer and gets new pages for the
    next. Clearing these pages takes the kernel up to a tenth of a prompt's time. Up to `KEPT_BYTES`
    of free memory at the heap's end are now kept. Has no effect with other C libraries (musl,
    macOS).

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
    # One heap for all threads: a thread's own heap is small, and is given back when empty.
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES)):
        if not mallopt(option, value):
            return False
    # Reserve this much address space at the heap's end; memory never written takes no pages.
    room = malloc(_ROOM)
    if not room:
        return False
    begin = -(-room // _HUGE_PAGE) * _HUGE_PAGE
    end = (room + _ROOM) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # huge pages are only advice, which may fail
    free(room)
    return True
