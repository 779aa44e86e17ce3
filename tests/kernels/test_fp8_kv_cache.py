"""A KV cache of float8: the Triton kernels that write it and read it against their definitions.

Triton's interpreter (3.7) rounds to float8 wrongly, knows no NaN there, and makes zeros of numbers
below 2^-6. Where there is no GPU, only numbers are stored and read that are float8 as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from baton_kernels import FP8, reference
from baton_kernels.attention.triton import TritonAttention
from baton_kernels.triton import fp8
from baton_kernels.triton.norm_rotary_store import norm_rotary_store, store_kv
from tests.kernels.test_triton_attention import MIXED, Layer

NORMAL = 2.0**-6
SLOTS = (7, 3, -1, 0)
SCALES = [(1.0, 1.0), (0.25, 2.0)]  # of keys and values


@pytest.fixture(autouse=True)
def _on_device(device: torch.device) -> Iterator[None]:
    if device.type == "cuda" and not fp8.has_fp8(device):
        pytest.skip("this GPU has no float8")
    with torch.device(device):
        yield


def numbers(x: Tensor, smallest: float, device: torch.device) -> Tensor:
    """Return the numbers; off a GPU, rounded to float8, as the interpreter converts no others."""
    if device.type == "cuda":
        return x
    return torch.where(x.abs() < smallest, 0, x).to(FP8).to(x.dtype)


def assert_same_bits(ours: Tensor, meant: Tensor) -> None:
    """Also where nothing is written."""
    assert ours._base is not None
    assert meant._base is not None
    assert torch.equal(ours._base.view(torch.uint8), meant._base.view(torch.uint8))


def caches(num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """One layer of two caches in which every number is NaN."""
    shape = (3, 2, 2, num_kv_heads, 4, head_dim)
    one, other = (torch.full(shape, 0x7F, dtype=torch.uint8).view(FP8) for _ in range(2))
    return one[:, 1], other[:, 1]


# Without norms a kernel multiplies with what nobody needs, and nobody sees the product.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32)])
def test_stores_the_bits_of_the_definition(
    head_dim: int,
    rotary_dim: int,
    scales: tuple[float, float],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_tokens, num_heads, num_kv_heads = len(SLOTS), 3, 2
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * 4
    qkv[:, ::7] *= 200  # some are too large for float8
    qkv = numbers(qkv, 2 * NORMAL, device).to(dtype)
    # No turn, as sums are rounded in another order, and the next float8 is far away.
    cos, sin = torch.ones(num_tokens, rotary_dim), torch.zeros(num_tokens, rotary_dim)
    ours, meant = caches(num_kv_heads, head_dim)
    arguments = (qkv, num_heads, cos.to(dtype), sin.to(dtype))
    key_scale, value_scale = scales
    for op, cache in ((norm_rotary_store, ours), (reference.norm_rotary_store, meant)):
        op(*arguments, cache, torch.tensor(SLOTS), key_scale=key_scale, value_scale=value_scale)
    assert_same_bits(ours, meant)
    assert float(ours.float().nan_to_num().abs().max()) == reference.FP8_MAX
    heads = qkv.view(num_tokens, -1, head_dim)
    key, value = heads[:, num_heads : num_heads + num_kv_heads], heads[:, -num_kv_heads:]
    again, _ = caches(num_kv_heads, head_dim)
    store_kv(key, value, again, torch.tensor(SLOTS), key_scale=key_scale, value_scale=value_scale)
    assert_same_bits(again, meant)


@pytest.mark.gpu
def test_nan_stays_nan(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter knows no NaN of float8")
    qkv = torch.full((1, 3 * 16), math.nan)
    ours, _ = caches(1, 16)
    ours.view(torch.uint8).zero_()
    norm_rotary_store(qkv, 1, torch.ones(1, 16), torch.zeros(1, 16), ours, torch.tensor([2]))
    assert ours[0, :, :, 2].isnan().all()


def quantized(layer: Layer, device: torch.device) -> Layer:
    """Give a layer a float8 cache, in which unused slots stay NaN, and return the layer."""
    layer.kv_cache = numbers(layer.kv_cache.float(), NORMAL, device).to(FP8)
    return layer


@pytest.mark.parametrize("window", [None, 25])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention(
    head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    layer = quantized(Layer(MIXED, dtype=dtype, head_dim=head_dim, num_padding=2), device)
    layer.check(layer.run(window=window), window=window)


def test_long_decodes_and_prompts_that_are_split(device: torch.device) -> None:
    layer = quantized(Layer(([1, 1, 5], [900, 3, 1250]), num_heads=3, num_kv_heads=1), device)
    layer.check(layer.run(soft_cap=0.5), soft_cap=0.5)


def test_a_gpu_without_float8_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    reason = TritonAttention.reason_against_fp8(torch.device("cuda", 0))
    assert reason == "float8 needs a GPU of compute capability 8.9 or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert TritonAttention.reason_against_fp8(torch.device("cuda", 0)) is None


def test_without_float8_the_definition_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_kernels.triton.norm_rotary_store.has_fp8", lambda device: False)
    qkv = torch.rand(4, 3 * 16) / 300  # nothing but subnormals
    ours, meant = caches(1, 16)
    angles = torch.ones(4, 16), torch.zeros(4, 16)
    for op, cache in ((norm_rotary_store, ours), (reference.norm_rotary_store, meant)):
        op(qkv, 1, *angles, cache, torch.tensor(SLOTS))
    assert_same_bits(ours, meant)
