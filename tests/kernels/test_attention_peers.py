"""The attention benchmark takes every library that is there, and says which are not."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
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


@pytest.fixture
def attention_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("attention_gpu")
    monkeypatch.setattr(module, "COLD_BYTES", 1)  # of each cell one layer: no time is looked at
    return module


def test_a_library_that_can_be_imported_is_measured(
    attention_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention_gpu.peers() == ([], ["FlashAttention 2", "FlashAttention 3"])
    (tmp_path / "flash_attn_interface.py").write_text(PEER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention_gpu.peers() == (["FlashAttention 3"], ["FlashAttention 2"])
    for cells in (attention_gpu.prefill_cells, attention_gpu.decode_cells):
        cell = next(cells("cpu"))
        _, theirs = attention_gpu.measure_cell(cell, "cpu")
        assert set(theirs) == {"sdpa", "FlashAttention 3"}


def test_a_library_that_is_wrong_is_told_of(
    attention_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * 2

    monkeypatch.setattr(attention_gpu, "libraries", lambda cell: [("wrong", twice)])
    with pytest.raises(RuntimeError, match="differs from wrong by"):
        attention_gpu.measure_cell(next(attention_gpu.decode_cells("cpu")), "cpu")
