"""Chooses the implementation of ops by device: C on CPUs, Triton on GPUs, else the reference.

No other module chooses implementations. Refuses to know: what the ops compute.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from baton.kernel_library.switch import are_kernels_off
from baton_kernels import reference
from baton_kernels.native.ops import NativeOps, load_native_ops
from baton_kernels.ops import Ops


@functools.cache
def native_ops() -> NativeOps | None:
    """Return the native ops for CPUs; None if they are switched off or cannot be built."""
    return None if are_kernels_off() else load_native_ops()


def ops_for(tensor: Tensor) -> Ops:
    """Return the fastest ops for the device of a tensor."""
    if tensor.is_cpu and (native := native_ops()) is not None:
        return native
    if tensor.is_cuda:
        return _triton_ops()
    return reference


# Op -> module in baton_kernels.triton that has a function of the op's name.
_TRITON = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "silu_mul": "silu_mul",
    "gated_mul": "silu_mul",
    "gate_mul": "silu_mul",
    "norm_rotary_store": "norm_rotary_store",
    "gated_rms_norm": "recurrent.gated_norm",
    "causal_conv": "recurrent.causal_conv",
    "selective_scan": "recurrent.recurrence",
    "gated_delta_rule": "recurrent.recurrence",
    "experts": "experts",
    "quantized_linear": "quantized_linear",
    "add_low_rank_by_slot": "low_rank",
    "invariant_linear": "invariant.linear",
}


@functools.cache
def _triton_ops() -> Ops:
    """Load the Triton ops; use the reference's op if a module cannot be imported."""
    ops: Any = SimpleNamespace(
        packed_linear=reference.packed_linear,
        packed_gated_linear=reference.packed_gated_linear,
        grouped_packed_linear=reference.grouped_packed_linear,
        norm_rotary_store_latent=reference.norm_rotary_store_latent,
        packed_scores=reference.packed_scores,
        route=reference.route,
        scaled_add=reference.scaled_add,
        add_low_rank=reference.add_low_rank,
        join=reference.join,
        largest=reference.largest,
        soft_cap=reference.soft_cap,
        attend_runs=reference.attend_runs,
    )
    for name, module in _TRITON.items():
        try:
            owner: ModuleType = importlib.import_module(f"baton_kernels.triton.{module}")
        except ImportError:
            owner = reference
        setattr(ops, name, getattr(owner, name))
    found: Ops = ops
    return found
