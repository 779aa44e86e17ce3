"""Paged attention over latents for NVIDIA GPUs in Triton: kernels for decodes and for prompts.

Refuses to know: models, schedulers, and how the kernels work (``baton_kernels.triton.latents``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.triton.decode_attention import DecodeBuffers, launch_plan
from baton_kernels.triton.latents.attention import (
    LatentShape,
    allocate,
    launch_decodes,
    launch_prompts,
    list_tiles,
)


class TritonLatentAttention:
    """``AttentionBackend`` for layers that keep one vector per token (MLA).

    For a request with one new token, the keys are divided among GPU programs. The queries of all
    other requests are divided into tiles by the host.
    """

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._buffers: dict[int, DecodeBuffers] = {}  # buffers by maximum number of requests
        self._tiles: Tensor | None = None  # tiles of this step's prompts
        self._is_planned = False  # whether the division of this step's decodes is launched
        self._num_rows = 0  # the query's rows from here on are padding

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why a float8 cache is not supported: no kernel stores latents in float8."""
        return "latents are not kept in float8"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; see ``AttentionBackend.plan``.

        The step's first ``run`` plans what depends on shapes.
        """
        self._metadata = metadata
        self._tiles, self._is_planned = None, False
        self._num_rows = sum(metadata.query_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; ``kv_cache`` is made by ``as_keys_and_values``."""
        scale, sliding_window, soft_cap, value_dim, sinks = options
        assert value_dim is not None, "layers that keep one vector per token"
        unknown = (sliding_window, soft_cap, sinks)
        assert all(one is None for one in unknown), "no network over latents has them"
        assert metadata is self._metadata, "plan() has not seen this step's metadata"
        cache = kv_cache[:, 0, 0]  # [num_blocks, block_size, width]
        assert query.stride()[1:] == (cache.shape[2], 1), f"heads lie apart: {query.stride()}"
        assert cache.stride(2) == 1
        num_tokens, num_heads, width = query.shape
        shape = LatentShape(
            *(num_heads, value_dim, width - value_dim, cache.shape[1], query.element_size())
        )
        out = query.new_empty(num_tokens, num_heads, value_dim)
        if metadata.max_query_len > 1:
            if self._tiles is None:
                self._tiles = list_tiles(metadata, shape)
            launch_prompts(out, query, cache, metadata, self._tiles, shape, scale)
        if metadata.max_query_len <= 1 or 1 in metadata.query_lens:
            buffers = self._buffers_of_step(shape, query.device)
            launch_decodes(out, query, cache, metadata, buffers, shape, scale)
        elif self._num_rows < num_tokens:
            out[self._num_rows :].zero_()
        return out

    def _buffers_of_step(self, shape: LatentShape, device: torch.device) -> DecodeBuffers:
        metadata = self._metadata
        assert metadata is not None
        capacity = 1 << (metadata.num_requests - 1).bit_length()
        buffers = self._buffers.get(capacity)
        if buffers is None:
            # Make normal tensors, not inference tensors, because a later caller may be outside of
            # inference_mode.
            with torch.inference_mode(mode=False):
                buffers = self._buffers[capacity] = allocate(capacity, shape, device)
        if not self._is_planned:
            launch_plan(buffers, metadata, None)
            self._is_planned = True
        return buffers
