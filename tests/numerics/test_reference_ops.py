"""The reference ops against plain torch and against Hugging Face's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from baton_kernels import reference as ops
from tests.numerics.paged import make_cache, make_metadata, make_tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_hugging_faces(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 2.0)
    x = torch.randn(7, 3, 24).to(dtype)
    torch.testing.assert_close(ops.rms_norm(x, norm.weight, 1e-5), norm(x), rtol=0, atol=0)


def test_add_rms_norm_returns_the_sum_and_its_norm() -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.rand(16)
    before = residual.clone()
    normed, new_residual = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, before)
    torch.testing.assert_close(new_residual, x + residual)
    expected = functional.rms_norm(x + residual, (16,), weight, 1e-6)
    torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_turns_the_first_dims_like_hugging_face(rotary_dim: int) -> None:
    query, key = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    angles = torch.rand(6, rotary_dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    turned = ops.rotary(query, key, cos, sin)
    expected = apply_rotary_pos_emb(
        query[..., :rotary_dim], key[..., :rotary_dim], cos, sin, unsqueeze_dim=1
    )
    for ours, original, theirs in zip(turned, (query, key), expected, strict=True):
        assert torch.equal(ours[..., :rotary_dim], theirs)
        assert torch.equal(ours[..., rotary_dim:], original[..., rotary_dim:])


def test_silu_mul() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(
        ops.silu_mul(torch.cat((gate, up), dim=-1)), gate * torch.sigmoid(gate) * up
    )


@pytest.mark.parametrize("with_norm", [True, False])
def test_norm_rotary_store_is_its_parts_one_after_another(with_norm: bool) -> None:
    table = make_tables([9, 4], block_size=4, num_blocks=8)
    slots = make_metadata([9, 4], [9, 4], table, 4, 1).slot_mapping
    joined, apart = (make_cache(8, 3, 2, 4, 6)[:, 1].zero_() for _ in range(2))
    query, key, value = torch.randn(14, 4, 6), torch.randn(14, 2, 6), torch.randn(14, 2, 6)
    qkv = torch.cat((query, key, value), dim=1).flatten(1)
    cos, sin = torch.randn(14, 6), torch.randn(14, 6)
    weights = (torch.randn(6), torch.randn(6)) if with_norm else (None, None)
    rotated = ops.norm_rotary_store(
        *(qkv, 4, cos, sin, joined, slots),
        query_weight=weights[0],
        key_weight=weights[1],
        eps=1e-6,
    )
    if weights[0] is not None and weights[1] is not None:
        query = ops.rms_norm(query, weights[0], 1e-6)
        key = ops.rms_norm(key, weights[1], 1e-6)
    query, key = ops.rotary(query, key, cos, sin)
    ops.store_kv(key, value, apart, slots)
    assert torch.equal(rotated, query)
    assert torch.equal(joined, apart)


@pytest.mark.parametrize("num_padding", [0, 2])
def test_what_store_writes_gather_reads(num_padding: int) -> None:
    table = make_tables([9, 4], block_size=4, num_blocks=8)
    metadata = make_metadata([9, 4], [9, 4], table, 4, num_padding)
    cache = make_cache(8, 3, 2, 4, 6)
    key, value = torch.randn(13 + num_padding, 2, 6), torch.randn(13 + num_padding, 2, 6)
    ops.store_kv(key, value, cache[:, 1], metadata.slot_mapping)
    for rows, blocks in ((slice(0, 9), table[0]), (slice(9, 13), table[1])):
        length = rows.stop - rows.start
        found_key, found_value = ops.gather_kv(cache[:, 1], blocks, length)
        assert torch.equal(found_key, key[rows].transpose(0, 1))
        assert torch.equal(found_value, value[rows].transpose(0, 1))
    # Nothing else was touched: 13 tokens x 2 (key, value) x 2 heads x 6 dims.
    assert int(cache.isfinite().sum()) == 13 * 2 * 2 * 6


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("query_len", [1, 4, 11])
def test_paged_attention_against_plain_torch(query_len: int, window: int | None) -> None:
    seq_len, num_heads, num_kv_heads, head_dim = 11, 6, 2, 10
    table = make_tables([seq_len], block_size=4, num_blocks=5)
    cache = make_cache(5, 2, num_kv_heads, 4, head_dim)
    key, value = torch.randn(2, seq_len, num_kv_heads, head_dim)
    slots = make_metadata([seq_len], [seq_len], table, 4).slot_mapping
    ops.store_kv(key, value, cache[:, 0], slots)
    query = torch.randn(query_len, num_heads, head_dim)
    found = ops.paged_attention(
        query, cache[:, 0], table, [query_len], [seq_len], scale=0.3, sliding_window=window
    )
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(3, 0),
        value.transpose(0, 1).repeat_interleave(3, 0),
        attn_mask=seen[-query_len:],
        scale=0.3,
    )
    torch.testing.assert_close(found, expected.transpose(0, 1))
