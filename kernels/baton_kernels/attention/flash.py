"""Paged attention with the packages of FlashAttention 2 and 3.

FlashAttention-3 (module ``flash_attn_interface``, Hopper) takes blocks of any size,
FlashAttention-2 (package ``flash_attn``) only multiples of 256 tokens. Both need a cache
``[num_blocks, block_size, num_kv_heads, head_dim]`` with a contiguous last dimension (see their
``flash_api.cpp``), so they get a transposed view of Baton's cache.

CUDA graphs are not supported, because the host must know where padding begins. Refuses to know:
models, schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions

LARGEST_HEAD = 256  # limits of the head size, in both packages
HEAD_MULTIPLE = 8
NEWEST, _HOPPER = 3, 9
_MODULES = {NEWEST: "flash_attn_interface", 2: "flash_attn"}


def installed_version() -> int | None:
    """Return the newest version of FlashAttention that is installed: 3, 2 or None."""
    return next((version for version, name in _MODULES.items() if find_spec(name)), None)


def block_size_multiple(version: int) -> int:
    """Return the number of which the KV cache's block size must be a multiple."""
    return 1 if version == NEWEST else 256


def reason_against_gpu(version: int, device: torch.device | str) -> str | None:
    """Return a phrase that says why a GPU cannot run this version; None: it can, or is no GPU."""
    if version != NEWEST or torch.device(device).type != "cuda":
        return None
    if torch.cuda.get_device_capability(device)[0] == _HOPPER:
        return None
    return "FlashAttention-3 is for GPUs of compute capability 9.0"


def reason_against_head(head_dim: int) -> str | None:
    """Return a phrase that says why heads of this size are not supported; None: they are."""
    if head_dim % HEAD_MULTIPLE or head_dim > LARGEST_HEAD:
        return f"heads must have a multiple of 8 numbers, at most {LARGEST_HEAD}, got {head_dim}"
    return None


class FlashAttention:
    """``AttentionBackend`` over the newest installed FlashAttention.

    Version 3 computes every step with ``flash_attn_with_kvcache``. In version 2, this function
    cannot compute prompts of unequal lengths, so ``flash_attn_varlen_func`` computes all steps with
    prompts. Supports only float16 and bfloat16, as do the packages.
    """

    def __init__(self) -> None:
        version = installed_version()
        assert version is not None, "refused when the backend is chosen"
        self._version = version
        self._functions: Any = import_module(_MODULES[version])
        self._key_starts = torch.empty(0, dtype=torch.int32)  # [num_requests + 1], for version 2
        self._num_rows = 0  # first row of padding
        self._only_decodes = False

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why a float8 cache is not supported: the packages would need float8 queries."""
        return "it takes a cache of the model's dtype only"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; see ``AttentionBackend.plan``."""
        self._num_rows = sum(metadata.query_lens)
        self._only_decodes = all(query_len == 1 for query_len in metadata.query_lens)
        ends = metadata.seq_lens.cumsum(0, dtype=torch.int32)
        self._key_starts = torch.cat((ends.new_zeros(1), ends))

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention (``AttentionBackend.run``), without latents or sinks."""
        assert options.value_dim is None, "values are as long as keys"
        assert options.sinks is None, "refused when the backend is chosen"
        # [num_blocks, block_size, num_kv_heads, head_dim] each
        key, value = kv_cache.transpose(2, 3).unbind(1)
        newest = options.sliding_window
        compute, rows, own = self._call(query[: self._num_rows], metadata)
        found: Tensor = compute(
            rows,
            key,
            value,
            softmax_scale=options.scale,
            causal=True,
            window_size=(-1, -1) if newest is None else (newest - 1, 0),
            softcap=options.soft_cap or 0.0,
            **own,
        )
        found = found.reshape(self._num_rows, *query.shape[1:])
        if self._num_rows == len(query):
            return found
        return torch.cat((found, found.new_zeros(len(query) - self._num_rows, *found.shape[1:])))

    def _call(
        self, query: Tensor, metadata: AttentionMetadata
    ) -> tuple[Callable[..., Tensor], Tensor, dict[str, Any]]:
        """Return the function for the planned step, its queries, and its own arguments."""
        if self._version == NEWEST:
            return (
                self._functions.flash_attn_with_kvcache,
                query,
                {
                    "cache_seqlens": metadata.seq_lens,
                    "page_table": metadata.block_table,
                    "cu_seqlens_q": metadata.query_start_loc,
                    "max_seqlen_q": metadata.max_query_len,
                },
            )
        if self._only_decodes:
            # Unlike flash_attn_varlen_func, this divides long contexts among multiprocessors.
            return (
                self._functions.flash_attn_with_kvcache,
                query.unsqueeze(1),  # [num_requests, 1, num_heads, head_dim]
                {"cache_seqlens": metadata.seq_lens, "block_table": metadata.block_table},
            )
        return (
            self._functions.flash_attn_varlen_func,
            query,
            {
                "cu_seqlens_q": metadata.query_start_loc,
                "cu_seqlens_k": self._key_starts,
                "max_seqlen_q": metadata.max_query_len,
                "max_seqlen_k": metadata.max_seq_len,
                "block_table": metadata.block_table,
            },
        )
