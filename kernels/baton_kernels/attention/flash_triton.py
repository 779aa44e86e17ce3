"""FlashAttention-3 for steps with prompts, Triton for all other steps, which can be captured.

On Hopper, FlashAttention's prompt kernels are faster than Triton's. Its decode kernels are not, and
their work on the host cannot be captured in a CUDA graph. Both libraries read the same cache and
metadata. Refuses to know: how either library works.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.flash import FlashAttention, installed_version
from baton_kernels.attention.triton import TritonAttention

_VERSION, _HOPPER = 3, 9


def reason_against(device: torch.device | str) -> str | None:
    """Return why a GPU cannot run both libraries, as a phrase; None: it can."""
    if installed_version() != _VERSION:
        return "FlashAttention-3 is not installed"
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "FlashAttention-3 is for GPUs of compute capability 9.0"
    return None


class FlashTritonAttention:
    """``AttentionBackend`` over both; FlashAttention computes every step that has a prompt.

    Takes only float16 and bfloat16, and no sinks, like FlashAttention.
    """

    def __init__(self) -> None:
        self._triton, self._flash = TritonAttention(), FlashAttention()
        self._is_captured = False

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return FlashAttention's reason against a float8 cache."""
        return FlashAttention.reason_against_fp8(device)

    def plan(self, metadata: AttentionMetadata) -> None:
        """Implement ``AttentionBackend.plan``, for the library that computes the step."""
        self._is_captured = False
        if metadata.max_query_len > 1:
            self._flash.plan(metadata)
        else:
            self._triton.plan(metadata)

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """Implement ``TritonAttention.plan_captured``."""
        self._is_captured = True
        self._triton.plan_captured(metadata)

    def fill_captured(
        self, num_tokens: int, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Implement ``TritonAttention.fill_captured``."""
        self._triton.fill_captured(num_tokens, query_lens, seq_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Implement ``AttentionBackend.run``."""
        is_flash = metadata.max_query_len > 1 and not self._is_captured
        backend = self._flash if is_flash else self._triton
        return backend.run(query, kv_cache, metadata, options)
