"""The loaded library: its functions' types, and torch's OpenMP runtime under it.

Refuses to know: tensors.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from baton_kernels.native.build import BuildError, cached_library

logger = logging.getLogger(__name__)

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")


class StoreCall(Structure):
    """``store_call`` in rows.c."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("rotary_dim", "qkv_stride")),
        *((name, c_int64) for name in ("block_stride", "kv_stride", "head_stride")),
        *((name, c_int64) for name in ("token_stride", "block_size")),
        *((name, c_void_p) for name in ("qkv", "query_weight", "key_weight", "cos", "sin")),
        *((name, c_void_p) for name in ("kv_cache", "out", "slots")),
        ("eps", c_double),
        ("cache_type", c_int64),
        *((name, c_double) for name in ("key_factor", "value_factor")),
    )


class AttentionCall(Structure):
    """``attention_call`` in attention.h."""

    _fields_ = (
        *((name, c_int64) for name in ("type", "cache_type")),
        *((name, c_int64) for name in ("num_threads", "num_tokens", "num_requests")),
        *((name, c_int64) for name in ("max_blocks", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "block_stride", "kv_stride", "head_stride")),
        *((name, c_int64) for name in ("token_stride", "sliding_window")),
        *((name, c_void_p) for name in ("query", "kv_cache", "out")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_table")),
        ("scale", c_double),
        ("soft_cap", c_double),
    )


# Function: (result, arguments), as in kernels/csrc.
_SIGNATURES = {
    "baton_panel": (c_int, []),
    "baton_huge_pages": (None, [c_void_p, c_int64]),
    "baton_linear": (
        c_int,
        [*(c_int,) * 4, *(c_int64,) * 3, c_void_p, c_int64, *(c_void_p,) * 4],
    ),
    "baton_rms_norm": (
        None,
        [*(c_int,) * 2, *(c_int64,) * 2, *(c_void_p,) * 3, c_float, *(c_void_p,) * 2],
    ),
    "baton_silu_mul": (None, [*(c_int,) * 2, *(c_int64,) * 2, *(c_void_p,) * 2]),
    "baton_norm_rotary_store": (None, [*(c_int,) * 2, POINTER(StoreCall)]),
    "baton_attention": (c_int, [POINTER(AttentionCall)]),
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library, built if need be; None, and one line in the log, where it cannot be had."""
    try:
        runtime = _openmp_runtime()
        if runtime is not None:
            # Two OpenMP runtimes in a process would fight for its cores: ours is torch's.
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(cached_library(runtime)))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (BuildError, OSError, AttributeError) as error:
        logger.warning("no native kernels, torch computes instead (slower): %s", error)
        return None
    logger.info("native kernels: %s threads", "OpenMP" if runtime else "no")
    return library


def _openmp_runtime() -> str | None:
    """The file of the OpenMP runtime that torch has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    lines = maps.read_text(encoding="utf-8").splitlines()
    mapped = sorted({line.split(maxsplit=5)[-1] for line in lines if _OPENMP.search(line)})
    torchs = [path for path in mapped if path.startswith(str(Path(torch.__file__).parent.parent))]
    return next(iter(torchs or mapped), None)
