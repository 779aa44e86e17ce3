"""float8 in Triton: which GPUs support it, and how numbers are converted.

Triton converts with instructions of compute capability 8.9 or newer (Ada, Hopper), and does not
compile float8 for older GPUs. Refuses to know: caches, where scales come from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.packed import FLOAT8_CAPABILITY


def has_fp8(device: torch.device) -> bool:
    """Return whether kernels on this device may use float8; True without a GPU (interpreter)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


@triton.jit
def to_stored(x, factor, dtype: tl.constexpr):
    """Convert to the cache's dtype; for float8, multiply by ``factor`` and clamp first."""
    if dtype == tl.float8e4nv:
        wide = x.to(tl.float32) * factor
        x = tl.clamp(wide, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
