"""Paged attention for CPUs without native kernels: gathers blocks, then calls torch's SDPA.

SDPA is scaled_dot_product_attention. For decodes, the query heads that share a KV head are passed
as if they were several queries of one head, so that SDPA reads each key once. For prompt chunks,
SDPA's own support of grouped queries is used.
Refuses to know: models, schedulers, CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.cpu_plan import DecodeGroup, PromptChunk, StepPlan, plan_step

_NO_PLAN = StepPlan((), (), 0)
_MaskKey = tuple[int, int | None, torch.dtype]


class CpuAttention:
    """``AttentionBackend`` over SDPA; blocks are gathered into a buffer that all calls reuse."""

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._plan = _NO_PLAN
        self._planned_block_size = 0
        self._masks: dict[_MaskKey, Tensor] = {}
        # The page faults of a new buffer per call would take 2 to 4 times as long as the gathering.
        self._buffer = torch.empty(0)

    @staticmethod
    def reason_against_fp8(device: torch.device) -> str | None:
        """Return None: a float8 cache is supported, because gathered blocks are converted."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share; see ``AttentionBackend.plan``.

        The block size is known only from the cache, which ``run`` gets. The plan therefore assumes
        the block size of the previous step; if this is wrong, as in the first step, ``run`` plans
        again.
        """
        self._metadata = metadata
        self._masks.clear()
        if self._planned_block_size:
            self._plan = plan_step(metadata, self._planned_block_size)

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute one layer's attention; see ``AttentionBackend.run``."""
        assert metadata is self._metadata, "plan() has not seen this step's metadata"
        if kv_cache.shape[3] != self._planned_block_size:
            self._planned_block_size = kv_cache.shape[3]
            self._masks.clear()
            self._plan = plan_step(metadata, self._planned_block_size)
        window = options.sliding_window
        if window is not None and window >= metadata.max_seq_len:
            window = None
        # [2, num_kv_heads, num_blocks, block_size, head_dim]: after gathering along dim 2, SDPA can
        # read the result without another copy.
        cache = kv_cache.permute(1, 2, 0, 3, 4)
        out = query.new_empty(*query.shape[:2], options.value_dim or query.shape[2])
        if self._plan.num_rows < len(out):
            out[self._plan.num_rows :].zero_()
        for index, chunk in enumerate(self._plan.prompts):
            mask = self._prompt_mask(index, chunk, window, query, metadata.row_ends)
            self._run_prompt(out, query, cache, chunk, mask, options)
        for index, group in enumerate(self._plan.decodes):
            mask = self._decode_mask(~index, group, window, query)
            self._run_decodes(out, query, cache, group, mask, options)
        return out

    def _run_prompt(
        self,
        out: Tensor,
        query: Tensor,
        cache: Tensor,
        chunk: PromptChunk,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        tokens = self._gather(cache, chunk.block_ids, query.dtype)[:, None, :, : chunk.seq_len]
        key, value = tokens.unbind(0)  # [1, num_kv_heads, seq_len, head_dim]
        attended = _attend(
            query[chunk.rows].transpose(0, 1).unsqueeze(0),  # [1, num_heads, query_len, head_dim]
            key,
            value[..., : out.shape[2]],
            mask,
            is_causal=mask is None,
            scale=options.scale,
            soft_cap=options.soft_cap,
            sinks=options.sinks,
        )  # [1, num_heads, query_len, value_dim]
        out[chunk.rows] = attended.squeeze(0).transpose(0, 1)

    def _run_decodes(
        self,
        out: Tensor,
        query: Tensor,
        cache: Tensor,
        group: DecodeGroup,
        mask: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        tokens = self._gather(cache, group.block_ids, query.dtype)
        if group.pad_slots is not None:
            # The mask hides pad slots, but 0 * NaN is NaN, so a NaN that another request left would
            # spread.
            tokens.index_fill_(2, group.pad_slots, 0.0)
        num_kv_heads, head_dim = tokens.shape[1], tokens.shape[3]
        by_request = tokens.view(2, num_kv_heads, group.num_requests, group.padded_len, head_dim)
        # [num_requests, num_kv_heads, max_len, head_dim]
        key, value = by_request[:, :, :, : group.max_len].transpose(1, 2).unbind(0)
        folded = (group.num_requests, num_kv_heads, -1, head_dim)
        attended = _attend(
            query[group.rows].reshape(folded),
            key,
            value[..., : out.shape[2]],
            mask,
            is_causal=False,
            scale=options.scale,
            soft_cap=options.soft_cap,
            sinks=None if options.sinks is None else options.sinks.view(num_kv_heads, -1),
        )  # [num_requests, num_kv_heads, num_heads / num_kv_heads, value_dim]
        out[group.rows] = attended.flatten(1, 2)

    def _gather(self, cache: Tensor, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy n blocks into the buffer; return ``[2, num_kv_heads, n * block_size, head_dim]``."""
        _, num_kv_heads, _, block_size, head_dim = cache.shape
        shape = (2, num_kv_heads, len(block_ids), block_size, head_dim)
        size = 2 * num_kv_heads * len(block_ids) * block_size * head_dim
        fitting = self._buffer.dtype == cache.dtype and self._buffer.device == cache.device
        if not fitting or self._buffer.numel() < size:
            # a normal tensor, because a later caller may not use inference_mode
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty(size, dtype=cache.dtype, device=cache.device)
        gathered = self._buffer[:size].view(shape)
        torch.index_select(cache, 2, block_ids, out=gathered)
        # only float8 is converted; other dtypes are not copied
        return gathered.view(2, num_kv_heads, -1, head_dim).to(dtype)

    def _prompt_mask(
        self,
        index: int,
        chunk: PromptChunk,
        window: int | None,
        query: Tensor,
        row_ends: Tensor | None,
    ) -> Tensor | None:
        """Make a mask ``[query_len, seq_len]`` to add to scores.

        Returns None if SDPA's own causal mask is enough.
        """
        if window is None and chunk.query_len == chunk.seq_len and row_ends is None:
            return None
        mask = self._masks.get((index, window, query.dtype))
        if mask is None:
            key_at = torch.arange(chunk.seq_len, device=query.device)  # [seq_len]
            query_at = key_at[-chunk.query_len :].unsqueeze(1)  # [query_len, 1]
            ends = None if row_ends is None else row_ends[chunk.rows, None]
            mask = _additive(_outside(key_at, query_at, window, ends), query.dtype)
            self._masks[index, window, query.dtype] = mask
        return mask

    def _decode_mask(
        self, index: int, group: DecodeGroup, window: int | None, query: Tensor
    ) -> Tensor | None:
        """Make a mask ``[num_requests, 1, 1, max_len]`` to add to scores.

        Returns None if every query attends to all keys.
        """
        if window is None and group.same_len:
            return None
        mask = self._masks.get((index, window, query.dtype))
        if mask is None:
            key_at = torch.arange(group.max_len, device=query.device)  # [max_len]
            hidden = _outside(key_at, group.seq_lens - 1, window)  # [num_requests, max_len]
            mask = _additive(hidden, query.dtype)[:, None, None]
            self._masks[index, window, query.dtype] = mask
        return mask


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Call SDPA; with soft caps or sinks, which SDPA lacks, compute in float32 without SDPA.

    Args:
        query: ``[n, num_heads, query_len, head_dim]``.
        key: ``[n, num_kv_heads, seq_len, head_dim]``.
        value: ``[n, num_kv_heads, seq_len, head_dim]``.
        mask: broadcasts to ``[n, num_heads, query_len, seq_len]``, and is added to the scores;
            None: no mask.
        is_causal: whether to apply a causal mask; ``query_len`` must then equal ``seq_len``.
        scale: factor of the dot products.
        soft_cap: scores ``s`` become ``soft_cap * tanh(s / soft_cap)``; None: no cap.
        sinks: ``[num_heads]``; ``[num_heads, query_len]`` if the rows of ``query`` are heads.
    """
    group = query.shape[1] // key.shape[1]
    if soft_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
    key, value = key.float(), value.float()
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.float() @ key.mT * scale  # [n, num_heads, query_len, seq_len]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:  # sinks are one more column of scores, without a value
        sink = sinks.view(len(sinks), -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).to(query.dtype)


def _outside(
    key_at: Tensor, query_at: Tensor, window: int | None, ends: Tensor | None = None
) -> Tensor:
    """Return a boolean mask that is True where a query may not attend to a key.

    Args:
        ends: each query attends to keys before this position; None: to keys up to its own position.
    """
    hidden = key_at >= (query_at + 1 if ends is None else ends)  # [queries, keys]
    return hidden if window is None else hidden | (key_at <= query_at - window)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into a mask to add; SDPA would do this again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )
