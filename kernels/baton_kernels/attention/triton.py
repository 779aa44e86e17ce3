"""Paged attention for NVIDIA GPUs in Triton: one kernel for decodes, one for prompt chunks.

Refuses to know: models, schedulers, and how the kernels work (``baton_kernels.triton``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata
from baton_kernels.triton.attention_tile import PagedShape
from baton_kernels.triton.decode_attention import DecodeBuffers, launch_decodes, launch_plan
from baton_kernels.triton.fp8 import has_fp8
from baton_kernels.triton.varlen_attention import Tiles, launch_tiles, plan_step


class TritonAttention:
    """``AttentionBackend`` over the kernels of ``baton_kernels.triton``.

    Requests with one token go to the decode kernel, the others, where there are any, to the one
    for prompt chunks. The work of the decode kernel is shared out on the device by a small kernel
    that a step's first ``run`` launches, so a CUDA graph of a decode-only step works like this:

    * Capture: ``plan`` with metadata of the captured size, then capture the forward. The graph
      holds the planning kernel too, and every launch's size depends on the captured size alone.
    * Replay: write ``query_start_loc``, ``seq_lens``, ``block_table`` and ``slot_mapping`` into
      the tensors of the captured metadata, and replay; there is nothing to call here. A step with
      fewer requests than captured ends in requests with ``query_len`` 0: rows behind the last
      token become zeros.

    Steps with prompt chunks cannot be captured: their tiles are listed on the host. Buffers are
    kept for every power of two of requests and never given back, as a graph may hold them.
    """

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._buffers: dict[tuple[int, int | None], DecodeBuffers] = {}
        self._planned: set[int | None] = set()  # windows whose work is shared out for this step
        self._tiles: dict[int | None, Tiles] = {}  # of this step, by window
        self._num_rows = 0  # where padding begins

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Triton converts float8 by the GPU's own instructions, which came with 8.9."""
        if has_fp8(device):
            return None
        return "float8 needs a GPU of compute capability 8.9 or newer"

    def plan(self, metadata: AttentionMetadata) -> None:
        """See ``AttentionBackend.plan``; what depends on shapes is planned by the first ``run``."""
        self._metadata = metadata
        self._planned.clear()
        self._tiles.clear()
        self._num_rows = sum(metadata.query_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        value_dim: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBackend.run``; there is none over latents."""
        assert value_dim is None, "values are as long as keys"
        assert metadata is self._metadata, "plan() has not seen this step's metadata"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        shape = PagedShape.of(query, kv_cache)
        has_prompts = metadata.max_query_len > 1
        if has_prompts:
            tiles = self._tiles_of_step(shape, query, sliding_window)
            launch_tiles(
                out, query, kv_cache, metadata, tiles, scale, sliding_window, soft_cap, sinks
            )
        if not has_prompts or 1 in metadata.query_lens:
            buffers = self._buffers_of_step(shape, query, sliding_window)
            launch_decodes(out, query, kv_cache, metadata, buffers, scale, soft_cap, sinks)
        elif self._num_rows < len(out):
            out[self._num_rows :].zero_()
        return out

    def _buffers_of_step(
        self, shape: PagedShape, query: Tensor, sliding_window: int | None
    ) -> DecodeBuffers:
        metadata = self._metadata
        assert metadata is not None
        capacity = 1 << (metadata.num_requests - 1).bit_length()
        buffers = self._buffers.get((capacity, sliding_window))
        if buffers is None:
            # Not inference tensors: the next caller may be outside inference_mode.
            with torch.inference_mode(mode=False):
                buffers = DecodeBuffers.allocate(capacity, shape, query.device)
            self._buffers[capacity, sliding_window] = buffers
        if sliding_window not in self._planned:
            launch_plan(buffers, metadata, shape, query.element_size(), sliding_window)
            self._planned.add(sliding_window)
        return buffers

    def _tiles_of_step(self, shape: PagedShape, query: Tensor, sliding_window: int | None) -> Tiles:
        metadata = self._metadata
        assert metadata is not None
        tiles = self._tiles.get(sliding_window)
        if tiles is None:
            tiles = plan_step(metadata, shape, query.element_size(), sliding_window, query.device)
            self._tiles[sliding_window] = tiles
        return tiles
