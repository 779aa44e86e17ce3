"""Paged attention for NVIDIA GPUs in Triton: one kernel for decodes, one for prompt chunks.

Refuses to know: models, schedulers, and how the kernels work (``baton_kernels.triton``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.triton.attention_tile import PagedShape
from baton_kernels.triton.decode_attention import (
    BoundDecodes,
    DecodeBuffers,
    bind_decodes,
    launch_plan,
)
from baton_kernels.triton.fp8 import has_fp8
from baton_kernels.triton.varlen_attention import (
    BoundTiles,
    CapturedTiles,
    Tiles,
    bind_tiles,
    plan_step,
)


class TritonAttention:
    """``AttentionBackend`` over the kernels of ``baton_kernels.triton``.

    The decode kernel computes requests with one new token, another kernel computes prompt chunks. A
    small kernel, launched by a step's first ``run``, divides the decode kernel's work on the
    device, without the host. So a step with decodes only can be captured as a CUDA graph:

    * Capture: ``plan`` with metadata of the captured size, then capture the forward. The graph
      holds the planning kernel too, and each launch's size depends only on the captured size.
    * Replay: write ``query_start_loc``, ``seq_lens``, ``block_table`` and ``slot_mapping`` into the
      tensors of the captured metadata, and replay, without calls of this class. A step with fewer
      requests than captured is padded with requests of ``query_len`` 0, whose rows become zeros.

    The host divides prompt chunks into tiles. To capture a step with prompt chunks, call
    ``plan_captured`` first; ``fill_captured`` then copies the step's requests to the device before
    each replay. In such a step, decodes are in tiles, too. Buffers (one per power of two of
    requests) and tiles (one list per captured size) are never freed, because a graph may hold their
    addresses.
    """

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._buffers: dict[tuple[int, int | None], DecodeBuffers] = {}
        # sliding windows for which the division of this step's decodes is launched already
        self._planned: set[int | None] = set()
        self._tiles: dict[int | None, Tiles] = {}  # tiles of this step, by window
        # The step's launches, by the shapes and options of the layers that share them.
        self._bound: dict[tuple[object, ...], tuple[BoundTiles | BoundDecodes, ...]] = {}
        # Tiles of captured steps, by number of tokens and window.
        self._captured_tiles: dict[tuple[int, int | None], CapturedTiles] = {}
        self._captures = False
        self._num_rows = 0  # the query's rows from here on are padding

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why a float8 cache is not supported on GPUs before compute capability 8.9."""
        if has_fp8(device):
            return None
        return "float8 needs a GPU of compute capability 8.9 or newer"

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; see ``AttentionBackend.plan``.

        The first ``run`` with each shape plans what depends on the shape.
        """
        self._metadata = metadata
        self._planned.clear()
        self._tiles.clear()
        self._bound.clear()
        self._captures = False
        self._num_rows = sum(metadata.query_lens)

    def plan_captured(self, metadata: AttentionMetadata) -> None:
        """Plan a step to be captured, before the lengths of its requests are known.

        Args:
            metadata: the metadata that all replays read, with room for the largest number of
                requests.
        """
        self.plan(metadata)
        self._captures = True

    def fill_captured(
        self, num_tokens: int, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        """Copy the tiles of a step that will replay a captured graph to the device.

        Args:
            num_tokens: number of tokens of the captured step.
            query_lens: new tokens of each request; together at most ``num_tokens``.
            seq_lens: all tokens of each request, including its new tokens.
        """
        for (size, _), tiles in self._captured_tiles.items():
            if size == num_tokens:
                tiles.fill(query_lens, seq_lens)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention (``AttentionBackend.run``), without latents."""
        scale, sliding_window, soft_cap, value_dim, sinks = options
        assert value_dim is None, "values are as long as keys"
        assert metadata is self._metadata, "plan() has not seen this step's metadata"
        # Layers with equal keys share launches. The cache's shape is not in the key, because all
        # layers of a group have caches of equal shape.
        alike = (
            query.shape, query.stride(), query.dtype, kv_cache.stride(), kv_cache.dtype, scale,
            sliding_window, soft_cap, sinks is None,
        )  # fmt: skip
        bound = self._bound.get(alike)
        if bound is None:
            bound = self._bind(query, kv_cache, scale, sliding_window, soft_cap)
            self._bound[alike] = bound
        # in a capture, the host does not know which rows will be padding
        make = torch.zeros_like if self._captures else torch.empty_like
        out = make(query, memory_format=torch.contiguous_format)
        for part in bound:
            part.launch(out, query, kv_cache, sinks)
        if self._captures:
            return out
        if self._num_rows < len(out) and isinstance(bound[-1], BoundTiles):
            out[self._num_rows :].zero_()  # if the decode kernel is launched, it zeroes the padding
        return out

    def _bind(
        self,
        query: Tensor,
        kv_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> tuple[BoundTiles | BoundDecodes, ...]:
        """Plan what layers of one shape share, and bind the step's launches for these layers."""
        metadata = self._metadata
        assert metadata is not None
        bound: list[BoundTiles | BoundDecodes] = []
        shape = PagedShape.of(query, kv_cache)
        if self._captures:
            step = (query, kv_cache, metadata, self._tiles_to_fill(shape, query, sliding_window))
            return (bind_tiles(*step, scale, sliding_window, soft_cap),)
        has_prompts = metadata.max_query_len > 1
        if has_prompts:
            tiles = self._tiles_of_step(shape, query, sliding_window)
            step = (query, kv_cache, metadata, tiles)
            bound.append(bind_tiles(*step, scale, sliding_window, soft_cap))
        if not has_prompts or 1 in metadata.query_lens:
            buffers = self._buffers_of_step(shape, query, sliding_window)
            bound.append(bind_decodes(query, kv_cache, metadata, buffers, scale, soft_cap))
        return tuple(bound)

    def _buffers_of_step(
        self, shape: PagedShape, query: Tensor, sliding_window: int | None
    ) -> DecodeBuffers:
        metadata = self._metadata
        assert metadata is not None
        capacity = 1 << (metadata.num_requests - 1).bit_length()
        buffers = self._buffers.get((capacity, sliding_window))
        if buffers is None:
            # Make normal tensors, not inference tensors, because a later caller may be outside of
            # inference_mode.
            with torch.inference_mode(mode=False):
                buffers = DecodeBuffers.allocate(capacity, shape, query)
            self._buffers[capacity, sliding_window] = buffers
        if sliding_window not in self._planned:
            launch_plan(buffers, metadata, sliding_window)
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

    def _tiles_to_fill(self, shape: PagedShape, query: Tensor, sliding_window: int | None) -> Tiles:
        metadata = self._metadata
        assert metadata is not None
        key = metadata.num_tokens, sliding_window
        if key not in self._captured_tiles:
            # Not in inference mode and not in a graph, because a step is computed once before its
            # capture.
            with torch.inference_mode(mode=False):
                self._captured_tiles[key] = CapturedTiles(
                    metadata.num_tokens, metadata.num_requests, shape, query.element_size(),
                    sliding_window, query.device,
                )  # fmt: skip
        return self._captured_tiles[key].tiles
