"""The ops a model may call, whatever computes them.

Today every op is its plain-torch meaning; this file is the one place where a device picks Triton
or native code instead. Refuses to know: models, requests, where a tensor came from.
"""

from __future__ import annotations

from baton_kernels.reference import (
    add_rms_norm,
    gather_kv,
    norm_rotary_store,
    paged_attention,
    rms_norm,
    rotary,
    silu_mul,
    store_kv,
)

__all__ = [
    "add_rms_norm",
    "gather_kv",
    "norm_rotary_store",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
    "store_kv",
]
