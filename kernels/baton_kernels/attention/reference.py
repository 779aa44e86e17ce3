"""Paged attention by the definition itself: slow, but right on any device.

Refuses to know: everything but the call of ``baton_kernels.reference.paged_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions


class ReferenceAttention:
    """``AttentionBackend`` that calls the definition; has nothing to plan."""

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return None: the definition takes any dtype."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Do nothing: the definition reads the metadata directly."""

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Implement ``AttentionBackend.run``."""
        return reference.paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_lens,
            metadata.seq_lens_host,
            **options._asdict(),
            row_ends=metadata.row_ends,
        )
