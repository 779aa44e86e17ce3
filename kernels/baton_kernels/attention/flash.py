"""Paged attention with the flash_attn packages, for comparison with our own kernels.

FlashAttention-3 (module ``flash_attn_interface``, Hopper) takes blocks of any size,
FlashAttention-2 (package ``flash_attn``) only multiples of 256 tokens. Both want ``[num_blocks,
block_size, num_kv_heads, head_dim]`` with a contiguous last dimension (their ``flash_api.cpp``), so
they get a transposed view of our cache.

Refuses to know: models, schedulers, CUDA graphs (the host must know where padding begins).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions


def installed_version() -> int | None:
    """Return the newest FlashAttention version that can be imported, 3 or 2, or None."""
    if find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if find_spec("flash_attn") is not None else None


def block_size_multiple(version: int) -> int:
    """Return the number that must divide the KV cache's block size."""
    return 1 if version == 3 else 256


class FlashAttention:
    """``AttentionBackend`` over ``flash_attn_with_kvcache`` (3) or ``flash_attn_varlen_func`` (2).

    Takes only float16 and bfloat16, like the packages.
    """

    def __init__(self) -> None:
        self._version = installed_version()
        name = "flash_attn_interface" if self._version == 3 else "flash_attn"
        self._functions = import_module(name)
        self._key_starts = torch.empty(0, dtype=torch.int32)  # [num_requests + 1], for version 2
        self._num_rows = 0  # first padding row

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why not: for a float8 cache, the packages need float8 queries."""
        return "it takes a cache of the model's dtype only"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Implement ``AttentionBackend.plan``."""
        self._num_rows = sum(metadata.query_lens)
        ends = metadata.seq_lens.cumsum(0, dtype=torch.int32)
        self._key_starts = torch.cat((ends.new_zeros(1), ends))

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Implement ``AttentionBackend.run``; latents and sinks are not supported."""
        assert options.value_dim is None, "values are as long as keys"
        assert options.sinks is None, "refused when the backend is chosen"
        # [num_blocks, block_size, num_kv_heads, head_dim] each
        key, value = kv_cache.transpose(2, 3).unbind(1)
        newest = options.sliding_window
        window = (-1, -1) if newest is None else (newest - 1, 0)
        out: Tensor
        if self._version == 3:
            out = self._functions.flash_attn_with_kvcache(
                query,
                key,
                value,
                cache_seqlens=metadata.seq_lens,
                page_table=metadata.block_table,
                cu_seqlens_q=metadata.query_start_loc,
                max_seqlen_q=metadata.max_query_len,
                softmax_scale=options.scale,
                causal=True,
                window_size=window,
                softcap=options.soft_cap or 0.0,
            )
        else:
            out = self._functions.flash_attn_varlen_func(
                query,
                key,
                value,
                cu_seqlens_q=metadata.query_start_loc,
                cu_seqlens_k=self._key_starts,
                max_seqlen_q=metadata.max_query_len,
                max_seqlen_k=metadata.max_seq_len,
                softmax_scale=options.scale,
                causal=True,
                window_size=window,
                softcap=options.soft_cap or 0.0,
                block_table=metadata.block_table,
            )
        if self._num_rows < len(out):
            out[self._num_rows :].zero_()
        return out
