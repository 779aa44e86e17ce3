"""Paged attention for CPUs in C, which reads the cache without gathering blocks.

If the C library does not support the tensors (such as float64), or is missing, the backend `cpu`
computes. Refuses to know: models, schedulers, CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.cpu import CpuAttention
from baton_kernels.dispatch import native_ops


class NativeAttention:
    """``AttentionBackend`` that calls the native (C) kernel of attention."""

    def __init__(self) -> None:
        self._ops = native_ops()
        self._fallback = CpuAttention()
        # the latest step that the backend `cpu` planned
        self._planned: AttentionMetadata | None = None

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return None: a float8 cache is supported, because the kernel converts what it reads."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Do nothing: the kernel reads the tensors of the metadata."""
        self._planned = None

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; see ``AttentionBackend.run``."""
        if self._ops is not None:
            out = self._ops.attention(query, kv_cache, metadata, options)
            if out is not None:
                return out
        if self._planned is not metadata:
            self._fallback.plan(metadata)
            self._planned = metadata
        return self._fallback.run(query, kv_cache, metadata, options)
