"""Paged attention by the reference op: slow, but correct on any device.

Refuses to know: everything but the call of ``baton_kernels.reference.paged_attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions


class ReferenceAttention:
    """An ``AttentionBackend`` that calls the reference op."""

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return None: the reference op supports a cache of any dtype."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Do nothing: the reference op reads the tensors of the metadata."""

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; see ``AttentionBackend.run``."""
        return reference.paged_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_lens,
            metadata.seq_lens_host,
            **options._asdict(),
            row_ends=metadata.row_ends,
        )
