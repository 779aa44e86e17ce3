"""LibraryPrompts: a library computes attention of steps with prompts, Triton all other steps.

A library's work on the host cannot be captured in a CUDA graph, so Triton computes decodes. Library
and Triton read the same cache and metadata. If times were measured on this kind of GPU
(`baton_kernels.attention.measured`), the faster of library and Triton computes a step with prompts.
Refuses to know: how library and Triton work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionOptions
from baton_kernels.attention.cpu import CpuAttention
from baton_kernels.attention.flash import FlashAttention
from baton_kernels.attention.flashinfer import FlashInferAttention
from baton_kernels.attention.measured import MeasuredStep, measured_steps, nearest
from baton_kernels.attention.triton import TritonAttention


class LibraryPrompts:
    """An ``AttentionBackend`` that uses a library for steps with prompts, and Triton otherwise.

    Attributes:
        library_name: the library's name among ``ATTENTION_BACKENDS``.
        make_library: makes the library's backend.
    """

    library_name: ClassVar[str]
    make_library: ClassVar[type[AttentionBackend]]

    def __init__(self) -> None:
        self._triton = TritonAttention()
        self._library = self.make_library()
        self._uses_library = False
        self._steps: tuple[MeasuredStep, ...] | None = None  # None: not yet read

    @classmethod
    def reason_against_fp8(cls, device: torch.device) -> str | None:
        """Return why the library or Triton cannot use a float8 cache; None: both can."""
        of_library = cls.make_library.reason_against_fp8(device)
        return of_library or TritonAttention.reason_against_fp8(device)

    def plan(self, metadata: AttentionMetadata) -> None:
        """Let Triton plan a step, and the library, too, if the step has prompts."""
        self._uses_library = metadata.max_query_len > 1
        if self._uses_library:
            self._library.plan(metadata)
        self._triton.plan(metadata)

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """Plan a step to be captured as a CUDA graph, which Triton computes."""
        self._uses_library = False
        self._triton.plan_captured(metadata)

    def fill_captured(
        self, num_tokens: int, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Copy the tiles of a step that will replay a captured graph to the device."""
        self._triton.fill_captured(num_tokens, query_lens, seq_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; see ``AttentionBackend.run``."""
        use_library = self._uses_library and self._library_is_faster(query, kv_cache, metadata)
        backend = self._library if use_library else self._triton
        return backend.run(query, kv_cache, metadata, options)

    def _library_is_faster(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> bool:
        """Return whether the most similar measured step was faster with the library.

        Without measurements on this GPU, the answer is True.
        """
        if self._steps is None:
            self._steps = measured_steps(query.device, self.library_name)
        if not self._steps:
            return True
        group = query.shape[1] // kv_cache.shape[2]
        step = nearest(
            self._steps, kv_cache.shape[4], group, metadata.max_query_len, metadata.max_seq_len
        )
        return step.us[self.library_name] < step.us["triton"]


class FlashTritonAttention(LibraryPrompts):
    """FlashAttention for prompts, Triton for decodes; only float16 and bfloat16, no sinks."""

    library_name, make_library = "flash_attn", FlashAttention


class FlashInferTritonAttention(LibraryPrompts):
    """FlashInfer for prompts, Triton for decodes; only float16 and bfloat16, no sinks."""

    library_name, make_library = "flashinfer", FlashInferAttention


class SdpaTritonAttention(LibraryPrompts):
    """Torch's SDPA over gathered blocks for prompts, Triton for decodes."""

    library_name, make_library = "sdpa", CpuAttention
