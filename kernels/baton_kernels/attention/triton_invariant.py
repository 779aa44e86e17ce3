"""Batch-invariant paged attention in Triton: a query's result does not depend on the batch.

Refuses to know: models, schedulers, and how the kernel works (``baton_kernels.triton``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.triton import TritonAttention
from baton_kernels.triton.attention_tile import PagedShape
from baton_kernels.triton.invariant.attention import (
    BoundInvariant,
    PartBuffers,
    bind_invariant,
    tiles_of_step,
)


class InvariantTritonAttention:
    """``AttentionBackend`` over `baton_kernels.triton.invariant.attention`.

    As with `TritonAttention`, a step with decodes only can be captured as a CUDA graph, because its
    launches do not depend on lengths. Steps with prompts are not captured. Buffers are never
    freed, because a graph may hold their addresses.
    """

    reason_against_fp8 = staticmethod(TritonAttention.reason_against_fp8)

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        # by maximum number of requests, largest last
        self._buffers: dict[PagedShape, list[PartBuffers]] = {}
        self._tiles: dict[PagedShape, Tensor] = {}  # tiles of this step
        # The step's launches, by the shapes and options of the layers that share them.
        self._bound: dict[tuple[object, ...], tuple[BoundInvariant, ...]] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; see ``AttentionBackend.plan``.

        The first ``run`` with each shape plans what depends on the shape.
        """
        self._metadata = metadata
        self._tiles.clear()
        self._bound.clear()

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention (``AttentionBackend.run``), without latents."""
        assert options.value_dim is None, "values are as long as keys"
        assert metadata is self._metadata, "plan() has not seen this step's metadata"
        bends, sinks = (options.scale, options.sliding_window, options.soft_cap), options.sinks
        alike = (
            query.shape, query.stride(), query.dtype, kv_cache.stride(), kv_cache.dtype, bends,
            sinks is None,
        )  # fmt: skip
        bound = self._bound.get(alike)
        if bound is None:
            bound = self._bind(query, kv_cache, metadata, bends)
            self._bound[alike] = bound
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for part in bound:
            part.launch(out, query, kv_cache, sinks)
        return out

    def _bind(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: tuple[float, int | None, float | None],
    ) -> tuple[BoundInvariant, ...]:
        """Bind the step's launches: one for decodes, which also zeroes padding, one for prompts."""
        shape, bound = PagedShape.of(query, kv_cache), list[BoundInvariant]()
        has_prompts = metadata.max_query_len > 1
        if not has_prompts or 1 in metadata.query_lens or sum(metadata.query_lens) < len(query):
            buffers = self._buffers_of_step(shape, metadata, query.device)
            bound.append(bind_invariant(query, kv_cache, metadata, buffers, *options))
        if has_prompts:
            if shape not in self._tiles:
                self._tiles[shape] = tiles_of_step(metadata, shape, query.element_size())
            bound.append(bind_invariant(query, kv_cache, metadata, self._tiles[shape], *options))
        return tuple(bound)

    def _buffers_of_step(
        self, shape: PagedShape, metadata: AttentionMetadata, device: torch.device
    ) -> PartBuffers:
        kept = self._buffers.setdefault(shape, [])
        if not kept or len(kept[-1].arrived) < metadata.num_requests:
            capacity = 1 << (metadata.num_requests - 1).bit_length()
            # Make normal tensors, not inference tensors, because a later caller may be outside of
            # inference_mode.
            with torch.inference_mode(mode=False):
                kept.append(PartBuffers.allocate(capacity, shape, device))
        return kept[-1]
