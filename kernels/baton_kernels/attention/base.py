"""The input of an attention backend for one step, and the interface of backends.

Refuses to know: schedulers, requests, models, and how any backend computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of each request a step computes, and where the requests' KV blocks are.

    The tokens of each request are adjacent. If a step is padded to the size of a captured CUDA
    graph, the tokens after the last request have slot -1, and the additional requests have
    ``query_len`` 0.
    """

    num_requests: int
    num_tokens: int
    query_start_loc: Tensor  # [num_requests + 1] int32, first token of each request
    seq_lens: Tensor  # [num_requests] int32, tokens in the cache, including this step's
    block_table: Tensor  # [num_requests, max_blocks] int32; entries after seq_len are unspecified
    slot_mapping: Tensor  # [num_tokens] int64, block_id * block_size + offset, or -1 for padding
    max_query_len: int
    max_seq_len: int
    # new tokens of each request, on the host, so that backends need not read a tensor
    query_lens: tuple[int, ...]
    seq_lens_host: tuple[int, ...]  # host copy of seq_lens
    # [num_tokens] int32, non-decreasing within a request: each token attends to keys before this
    # position. None: attention is causal; GPU backends support nothing else.
    row_ends: Tensor | None = None


class AttentionOptions(NamedTuple):
    """Options of a layer's attention, as `baton_kernels.reference.paged_attention` defines them.

    Attributes:
        scale: factor of the dot products.
        sliding_window: number of newest keys that a query attends to, including the query's own;
            None: all keys.
        soft_cap: scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; None: no cap.
        value_dim: number of each value's elements to use, from the first on; None: all. In a cache
            of latents (:func:`as_keys_and_values`), the other elements belong only to keys.
        sinks: ``[num_heads]`` float32, an additional score per head, without a value; None: no
            sinks.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: Tensor | None = None


def as_keys_and_values(latents: Tensor) -> Tensor:
    """View a cache of latents (MLA) as a cache with one KV head, whose values equal its keys.

    Args:
        latents: ``[num_blocks, block_size, width]``.

    Returns:
        A view, ``[num_blocks, 2, 1, block_size, width]``.
    """
    return latents[:, None, None].expand(-1, 2, -1, -1, -1)


class AttentionBackend(Protocol):
    """Paged causal attention in two calls: ``plan`` once per step, ``run`` once per layer.

    One instance belongs to one model runner and is used by one thread. A request's result does not
    depend on the other requests of the step, up to float rounding.
    ``baton_kernels.reference.paged_attention`` defines the result.

    Every backend supports a cache of the query's dtype; some also support a float8 cache.
    """

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return a phrase that says why this backend cannot use a float8 cache on a device.

        Returns None if it can.
        """
        ...

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; called before the first ``run`` of the step."""

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; the step's keys and values are already in the cache.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            kv_cache: this layer's ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``. This is
                a view with gaps between blocks, because a block's memory has all layers.
            metadata: the object that ``plan`` received.
            options: options of the layer's attention.

        Returns:
            ``[num_tokens, num_heads, value_dim]``; padding tokens get zeros.
        """
        ...
