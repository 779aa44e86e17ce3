"""The input of an attention backend for one step, and the protocol that backends implement.

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

    Requests follow one another in the token dimension. To pad a step to a captured size, tokens
    after the last request have slot -1, and further requests have ``query_len`` 0.
    """

    num_requests: int
    num_tokens: int
    query_start_loc: Tensor  # [num_requests + 1] int32, first token of each request
    seq_lens: Tensor  # [num_requests] int32, tokens in the cache, including this step's
    block_table: Tensor  # [num_requests, max_blocks] int32; entries after seq_len are unspecified
    slot_mapping: Tensor  # [num_tokens] int64, block_id * block_size + offset, or -1 for padding
    max_query_len: int
    max_seq_len: int
    # host copy of the query lengths, so that no backend has to read a tensor
    query_lens: tuple[int, ...]
    seq_lens_host: tuple[int, ...]  # host copy of seq_lens
    # [num_tokens] int32, non-decreasing within a request: each token attends to keys before this
    # position. None: attention is causal; GPU backends support nothing else.
    row_ends: Tensor | None = None


class AttentionOptions(NamedTuple):
    """Options of a layer's attention, as `baton_kernels.reference.paged_attention` defines them.

    Attributes:
        scale: factor of the dot products.
        sliding_window: number of newest keys that a query attends to, its own included.
        soft_cap: soft cap of the attention scores.
        value_dim: number of leading elements of each value to use; None: all. In a cache of latents
            (:func:`as_keys_and_values`), the other elements belong only to keys.
        sinks: ``[num_heads]`` float32.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: Tensor | None = None


def as_keys_and_values(latents: Tensor) -> Tensor:
    """View a cache of one vector per token (MLA) as one KV head whose values are its keys.

    Args:
        latents: ``[num_blocks, block_size, width]``.

    Returns:
        ``[num_blocks, 2, 1, block_size, width]``, no copy.
    """
    return latents[:, None, None].expand(-1, 2, -1, -1, -1)


class AttentionBackend(Protocol):
    """Paged causal attention in two calls: ``plan`` once per step, ``run`` once per layer.

    One instance belongs to one model runner and is used by one thread. A request's result does not
    depend on the other requests of the step, up to float rounding.
    ``baton_kernels.reference.paged_attention`` defines the result.

    Every backend takes a cache of the query's dtype; for float8, see `reason_against_fp8`.
    """

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return why a device cannot use a float8 cache, as a phrase; None if it can."""
        ...

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; call before the first ``run``."""

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; this step's keys and values must already be in the cache.

        Args:
            query: ``[num_tokens, num_heads, head_dim]``.
            kv_cache: this layer's ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, a
                strided view: memory is block-major with all layers inside a block.
            metadata: the object that ``plan`` received.
            options: the layer's options.

        Returns:
            ``[num_tokens, num_heads, value_dim]``; padding tokens get zeros.
        """
        ...
