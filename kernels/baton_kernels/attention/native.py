"""Paged attention for CPUs in C, directly from the cache, without gathering or planning.

Tensors that the C library does not support (such as float64), or all tensors without the library,
go to the torch-only backend. Refuses to know: models, schedulers, CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.cpu import CpuAttention
from baton_kernels.dispatch import native_ops


class NativeAttention:
    """``AttentionBackend`` on top of the native op."""

    def __init__(self) -> None:
        self._ops = native_ops()
        self._fallback = CpuAttention()
        # the latest step planned by the fallback backend
        self._planned: AttentionMetadata | None = None

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return None: a float8 cache is supported, because the op converts what it reads."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Do nothing: the op reads the metadata's tensors itself."""
        self._planned = None

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Implement ``AttentionBackend.run``."""
        if self._ops is not None:
            out = self._ops.attention(query, kv_cache, metadata, options)
            if out is not None:
                return out
        if self._planned is not metadata:
            self._fallback.plan(metadata)
            self._planned = metadata
        return self._fallback.run(query, kv_cache, metadata, options)
