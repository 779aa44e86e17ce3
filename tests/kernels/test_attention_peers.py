"""Tests that the attention benchmark measures all installed libraries, and names missing ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Stands in for FlashAttention 3: [batch, seq_len, heads, head_dim], and the sums beside the result.
PEER = """
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_func(query, key, value, causal):
    assert causal
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask = causal_lower_right(query.shape[2], key.shape[2])
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), None


flash_attn_with_kvcache = flash_attn_func
"""

# Stands in for FlashInfer, with the arguments that its release 0.6.3 has.
PAGED_PEER = """
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


class Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        if use_tensor_cores:
            raise RuntimeError("Could not find nvcc and default cuda_home\\nand more")
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def keep(self, starts, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size):
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
        assert len(indices) == indptr[-1]
        self.starts, self.indptr, self.indices = starts, indptr, indices
        self.seq_lens = (indptr.diff() - 1) * page_size + last_page_len

    def run(self, query, pages):
        out = []
        for i, seq_len in enumerate(self.seq_lens.tolist()):
            taken = pages[self.indices[self.indptr[i] : self.indptr[i + 1]].long()]
            key, value = taken.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
            new = query[self.starts[i] : self.starts[i + 1]].transpose(0, 1)
            mask = causal_lower_right(new.shape[1], seq_len)
            found = scaled_dot_product_attention(
                new[None], key[None], value[None], attn_mask=mask, enable_gqa=True
            )
            out.append(found[0].transpose(0, 1))
        return torch.cat(out)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(self, indptr, *sizes, q_data_type, kv_data_type):
        self.keep(torch.arange(len(indptr)), indptr, *sizes)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(self, qo_indptr, *sizes, causal, q_data_type, kv_data_type):
        assert causal
        self.keep(qo_indptr, *sizes)
"""


@pytest.fixture
def attention_gpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[ModuleType]:
    if device.type != "cpu":
        pytest.skip("what stands in for libraries computes on a CPU")
    module = importlib.import_module("benchmarks.kernels.attention_gpu")
    monkeypatch.setattr(module, "COLD_BYTES", 1)  # of each cell one layer: no time is looked at
    yield module
    for peer in module.PEERS.values():  # what stood in for one
        sys.modules.pop(peer, None)


def test_a_library_that_can_be_imported_is_measured(
    attention_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["FlashAttention 2", "FlashInfer"]
    assert attention_gpu.peers() == ([], ["FlashAttention 2", "FlashAttention 3", "FlashInfer"])
    (tmp_path / "flash_attn_interface.py").write_text(PEER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_gpu.peers() == (["FlashAttention 3"], others)
    for cells in (attention_gpu.prefill_cells, attention_gpu.decode_cells):
        cell = next(cells("cpu"))
        found = attention_gpu.measure_cell(cell, "cpu")
        assert set(found.theirs) == {"sdpa", "FlashAttention 3"}
        assert not found.refusals


def test_flashinfer_gets_the_pages_that_ours_gets(
    attention_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer.py").write_text(PAGED_PEER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_gpu.peers() == (["FlashInfer"], ["FlashAttention 2", "FlashAttention 3"])
    prefix = next(cell for cell in attention_gpu.prefill_cells("cpu") if cell.prefix)
    found = attention_gpu.measure_cell(prefix, "cpu")
    assert set(found.theirs) == {"sdpa", "FlashInfer"}
    for cell in attention_gpu.decode_cells("cpu"):
        found = attention_gpu.measure_cell(cell, "cpu")
        assert set(found.theirs) == {"sdpa", "FlashInfer"}
        assert found.refusals == {
            "FlashInfer tensor cores": "RuntimeError: Could not find nvcc and default cuda_home"
        }


def test_a_library_that_is_wrong_is_told_of(
    attention_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * 2

    monkeypatch.setattr(attention_gpu, "libraries", lambda cell: [("wrong", twice)])
    with pytest.raises(RuntimeError, match="differs from wrong by"):
        attention_gpu.measure_cell(next(attention_gpu.decode_cells("cpu")), "cpu")


def test_backends_are_timed_over_whole_steps(attention_gpu: ModuleType) -> None:
    """The tiny step is in float32, which libraries refuse; torch's attention takes it."""
    (row,) = attention_gpu.measure_steps("cpu")
    assert row["what"] == "4/2 x 64, 5 of 11"
    assert "failed" not in row
    assert isinstance(row["triton"], float)
    assert isinstance(row["sdpa"], float)
    assert "flashinfer refused" in row
