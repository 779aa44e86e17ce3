"""Stand-ins for attention libraries: they check arguments as the libraries do, and compute exactly.

Each has the functions that our backends call, with the names, order and rules of the library's own
interface: FlashAttention 2.8 (``flash_attn``), FlashAttention 3 (``flash_attn_interface``) and
FlashInfer 0.2 (``flashinfer``). Results are those of `baton_kernels.reference`, in 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from baton_kernels import reference

HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Calls:
    """The functions of a stand-in that were called, in order."""

    names: list[str] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """Let a library seem to be installed until the test ends."""
    calls = Calls()
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in _MAKERS[name](calls).items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def _compute(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    window_left: int,
    soft_cap: float,
) -> Tensor:
    """Compute the reference; ``cache``: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``."""
    assert query.dtype == cache.dtype
    assert query.dtype in HALF, "only float16 and bfloat16"
    assert query.stride(-1) == 1
    out = reference.paged_attention(
        query.float(),
        cache.float(),
        table,
        query_lens,
        seq_lens,
        scale=scale,
        sliding_window=None if window_left < 0 else window_left + 1,
        soft_cap=soft_cap or None,
    )
    return out.to(query.dtype)


def _blocks_before_heads(key: Tensor, value: Tensor, table: Tensor, multiple: int) -> Tensor:
    """Check FlashAttention's paged keys and values, and return them as our cache."""
    assert key.shape == value.shape
    assert key.stride(-1) == value.stride(-1) == 1, "the last dimension must be contiguous"
    assert key.stride() == value.stride()
    assert key.shape[1] % multiple == 0, f"block size must be a multiple of {multiple}"
    assert key.shape[3] in range(8, 257, 8), "head size"
    assert table.dtype == torch.int32
    assert table.stride(-1) == 1
    return torch.stack((key, value), dim=1).transpose(2, 3)


def _window(causal: bool, window_size: tuple[int, int]) -> int:
    assert causal
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    return window_size[0]


def _flash_2(calls: Calls) -> dict[str, object]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        *,
        block_table: Tensor,
    ) -> Tensor:
        calls.names.append("flash_attn_varlen_func")
        cache = _blocks_before_heads(k, v, block_table, 256)
        for starts in (cu_seqlens_q, cu_seqlens_k):
            assert starts.dtype == torch.int32
            assert starts.is_contiguous()
            assert len(starts) == len(block_table) + 1
        query_lens, seq_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max_seqlen_q == max(query_lens)
        assert max_seqlen_k == max(seq_lens)
        assert cu_seqlens_q[-1] == len(q), "a row of the query belongs to no request"
        assert softmax_scale is not None
        assert not dropout_p
        left = _window(causal, window_size)
        return _compute(q, cache, block_table, query_lens, seq_lens, softmax_scale, left, softcap)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        calls.names.append("flash_attn_with_kvcache")
        cache = _blocks_before_heads(k_cache, v_cache, block_table, 256)
        batch, new_tokens = q.shape[:2]
        assert cache_seqlens.dtype == torch.int32
        assert len(cache_seqlens) == len(block_table) == batch
        left = _window(causal, window_size)
        out = _compute(
            q.flatten(0, 1), cache, block_table, [new_tokens] * batch, cache_seqlens.tolist(),
            softmax_scale, left, softcap,
        )  # fmt: skip
        return out.view(q.shape)

    return {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
    }


def _flash_3(calls: Calls) -> dict[str, object]:
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        calls.names.append("flash_attn_with_kvcache")
        cache = _blocks_before_heads(k_cache, v_cache, page_table, 1)
        assert cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
        query_lens = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max(query_lens)
        assert cu_seqlens_q[-1] == len(q), "a row of the query belongs to no request"
        left = _window(causal, window_size)
        return _compute(
            q, cache, page_table, query_lens, cache_seqlens.tolist(), softmax_scale, left, softcap
        )

    return {"flash_attn_with_kvcache": flash_attn_with_kvcache}


class _Wrapper:
    """Base of both stand-in wrappers: it keeps a plan and computes it."""

    calls: Calls
    name: str

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) >= 128 * 2**20
        assert kv_layout == "HND"

    def _keep(
        self,
        query_lens: list[int],
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        sizes: tuple[int, int, int, int],
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
        counts = indptr.diff().tolist()
        assert min(counts) > 0
        assert len(indices) == indptr[-1]
        assert len(last_page_len) == len(counts) == len(query_lens)
        self.num_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        assert self.head_dim in (64, 128, 256)
        assert last_page_len.min() >= 1
        assert last_page_len.max() <= self.page_size
        self.query_lens = query_lens
        self.table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, pages in zip(self.table, torch.split(indices, counts), strict=True):
            row[: len(pages)] = pages
        self.seq_lens = [
            (count - 1) * self.page_size + last
            for count, last in zip(counts, last_page_len.tolist(), strict=True)
        ]
        assert all(new <= all_ for new, all_ in zip(query_lens, self.seq_lens, strict=True))
        self.scale, self.left, self.cap, self.types = sm_scale, window_left, logits_soft_cap, types

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        self.calls.names.append(self.name)
        assert q.shape == (sum(self.query_lens), self.num_heads, self.head_dim)
        assert paged_kv_cache.shape[1:] == (2, self.num_kv_heads, self.page_size, self.head_dim)
        assert (q.dtype, paged_kv_cache.dtype) == self.types
        return _compute(
            q, paged_kv_cache, self.table, self.query_lens, self.seq_lens, self.scale, self.left,
            self.cap or 0.0,
        )  # fmt: skip


def _flashinfer(calls: Calls) -> dict[str, object]:
    counted = calls

    class Decode(_Wrapper):
        calls, name = counted, "decode"

        def plan(
            self,
            indptr: Tensor,
            indices: Tensor,
            last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            sm_scale: float,
        ) -> None:
            self._keep(
                [1] * (len(indptr) - 1), indptr, indices, last_page_len,
                (num_qo_heads, num_kv_heads, head_dim, page_size), sm_scale, window_left,
                logits_soft_cap, (q_data_type, kv_data_type),
            )  # fmt: skip

    class Prefill(_Wrapper):
        calls, name = counted, "prefill"

        def plan(
            self,
            qo_indptr: Tensor,
            paged_kv_indptr: Tensor,
            paged_kv_indices: Tensor,
            paged_kv_last_page_len: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            *,
            causal: bool = False,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
            sm_scale: float,
        ) -> None:
            assert causal
            assert qo_indptr.dtype == torch.int32
            self._keep(
                qo_indptr.diff().tolist(), paged_kv_indptr, paged_kv_indices,
                paged_kv_last_page_len, (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type),
            )  # fmt: skip

    return {
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
    }


_MAKERS = {"flash_attn": _flash_2, "flash_attn_interface": _flash_3, "flashinfer": _flashinfer}
