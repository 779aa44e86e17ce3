"""The Triton ops between projection and attention against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.triton import norm_rotary_store as kernels
from baton_kernels.triton.norm_rotary_store import norm_rotary_store, rotary, store_kv
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.kernels.poison import strided
from tests.numerics.paged import make_cache
from tests.numerics.tolerances import assert_close

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 5, 3, 4
SLOTS = torch.tensor([7, 19, -1, 0, 12])  # block 3 last, one token of padding


def caches(num_kv_heads: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The second layer of two poisoned block-major caches, for a kernel and its definition."""
    shape = (NUM_BLOCKS, NUM_LAYERS, num_kv_heads, BLOCK_SIZE, head_dim)
    one, other = (make_cache(*shape).to(like) for _ in range(2))
    return one[:, 1], other[:, 1]


def assert_same_cache(ours: Tensor, meant: Tensor) -> None:
    """Same values where something is written, and nothing elsewhere, in any layer."""
    assert ours._base is not None
    assert meant._base is not None
    assert torch.equal(ours._base.isnan(), meant._base.isnan())
    assert_close(ours.nan_to_num(), meant.nan_to_num())


def angles(num_tokens: int, rotary_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, whose halves differ, so that a kernel that mixes them up is found out."""
    angle = torch.rand(num_tokens, rotary_dim) * 6
    return angle.cos().to(like), angle.sin().to(like)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "norms"),
    [
        (4, 2, 64, 64, "both"),
        (3, 1, 80, 80, "both"),
        (7, 7, 96, 96, "none"),
        (8, 2, 128, 128, "both"),
        (2, 1, 256, 256, "query"),
        (6, 2, 80, 32, "both"),  # partial rotary: a tail that is normed, not turned
        (2, 1, 6, 4, "key"),
        (5, 3, 64, 2, "none"),
        (3, 2, 80, 32, "value"),
        (2, 1, 64, 64, "all"),
        (3, 2, 80, 32, "queries only"),
    ],
)
def test_norm_rotary_store(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norms: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    like, num_tokens = torch.empty(0, dtype=dtype, device=device), len(SLOTS)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(like)
    cos, sin = angles(num_tokens, rotary_dim, like)
    ours, meant = caches(num_kv_heads, head_dim, like)
    weights: dict[str, Any] = {
        "query_weight": None if norms in ("none", "key", "value") else torch.randn(head_dim),
        "key_weight": torch.randn(head_dim) if norms in ("both", "key", "all") else None,
        "value_weight": torch.randn(head_dim) if norms in ("value", "all") else None,
    }
    weights = {name: one if one is None else one.to(like) for name, one in weights.items()}
    slots: Tensor | None = SLOTS.to(device)
    if norms == "queries only":
        qkv, slots = qkv[:, : num_heads * head_dim].contiguous(), None
    query = norm_rotary_store(qkv, num_heads, cos, sin, ours, slots, **weights, eps=1e-5)
    expected = reference.norm_rotary_store(
        qkv, num_heads, cos, sin, meant, slots, **weights, eps=1e-5
    )
    assert_close(query, expected)
    assert_same_cache(ours, meant)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "heads"), [(37, 2, 64, 32), (8, 1, 80, 16)]
)
def test_programs_process_more_heads_of_many_tokens(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few tokens count as many here, so that the reference is computed quickly."""
    monkeypatch.setattr(kernels, "MANY_TOKENS", len(SLOTS))
    kernels._bind.cache_clear()
    assert kernels.heads_of_program(len(SLOTS), head_dim) == heads
    sizes = (num_heads, num_kv_heads, head_dim, head_dim)
    test_norm_rotary_store(*sizes, "both", dtype, device)
    kernels._bind.cache_clear()


@pytest.mark.parametrize("of_all_heads", [False, True])
def test_wide_norms_of_heads(of_all_heads: bool, dtype: torch.dtype, device: torch.device) -> None:
    like, num_tokens = torch.empty(0, dtype=dtype, device=device), len(SLOTS)
    qkv = torch.randn(num_tokens, 8 * 16).to(like)
    cos, sin = angles(num_tokens, 16, like)
    ours, meant = caches(2, 16, like)
    weights: dict[str, Any] = {
        "query_weight": torch.randn(4 * 16 if of_all_heads else 16, device=device),
        "key_weight": torch.randn(2 * 16 if of_all_heads else 16, device=device),
    }
    slots = SLOTS.to(device)
    query = norm_rotary_store(qkv, 4, cos, sin, ours, slots, **weights, eps=1e-5)
    expected = reference.norm_rotary_store(qkv, 4, cos, sin, meant, slots, **weights, eps=1e-5)
    assert_close(query, expected)
    assert_same_cache(ours, meant)


def test_norm_rotary_store_reads_rows_that_are_apart(device: torch.device) -> None:
    qkv = torch.randn(len(SLOTS), 8 * 16, device=device)
    cos, sin = angles(len(SLOTS), 16, qkv)
    ours, meant = caches(2, 16, qkv)
    slots = SLOTS.to(device)
    query = norm_rotary_store(strided(qkv), 4, strided(cos), strided(sin), ours, slots)
    assert_close(query, reference.norm_rotary_store(qkv, 4, cos, sin, meant, slots))
    assert_same_cache(ours, meant)


def test_a_step_of_padding_writes_nothing(device: torch.device) -> None:
    qkv = torch.randn(3, 4 * 8, device=device)
    ours, _ = caches(1, 8, qkv)
    slots = torch.full((3,), -1, device=device)
    norm_rotary_store(qkv, 2, *angles(3, 8, qkv), ours, slots)
    store_kv(qkv[:, None, :8], qkv[:, None, 8:16], ours, slots)
    assert ours._base is not None
    assert ours._base.isnan().all()
    assert norm_rotary_store(qkv[:0], 2, *angles(0, 8, qkv), ours, slots[:0]).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 40), (128, 128), (256, 64), (6, 2)]
)
def test_rotary(head_dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    qkv = torch.randn(4, 13 * head_dim).to(device, dtype).view(4, 13, head_dim)
    query, key = qkv[:, :9], qkv[:, 9:12]  # views, as a model has them
    cos, sin = angles(4, rotary_dim, qkv)
    for ours, meant in zip(
        rotary(query, key, cos, sin), reference.rotary(query, key, cos, sin), strict=True
    ):
        assert_close(ours, meant)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (2, 256)])
def test_store_kv(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    kv = torch.randn(len(SLOTS), 2 * num_kv_heads, head_dim).to(device, dtype)
    ours, meant = caches(num_kv_heads, head_dim, kv)
    key, value = kv[:, :num_kv_heads], kv[:, num_kv_heads:]
    store_kv(key, value, ours, SLOTS.to(device))
    reference.store_kv(key, value, meant, SLOTS.to(device))
    assert_same_cache(ours, meant)
    assert torch.equal(ours.nan_to_num(), meant.nan_to_num())
