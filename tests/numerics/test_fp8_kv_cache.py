"""Tests of a float8 KV cache: the stored values, the attention over them, and its error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import baton_kernels as ops
from baton_kernels import FP8, reference
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionOptions
from baton_kernels.dispatch import native_ops
from tests.numerics.paged import make_cache, make_metadata, make_tables

BLOCK_SIZE = 4
SCALES = [(1.0, 1.0), (0.25, 3.7)]  # of keys and values


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def nearest_float8(x: Tensor) -> Tensor:
    """By search among all 253 numbers; of two that are as near, the one with an even code."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = codes.view(FP8).double()
    distance = (x.double().clamp(-448, 448)[:, None] - numbers).abs()  # [n, 253]
    near = distance == distance.amin(1, keepdim=True)
    sign = torch.signbit(numbers) == torch.signbit(x)[:, None]  # there are two zeros
    choice = near * 4 + (codes % 2 == 0) * 2 + sign
    return codes[choice.argmax(1)].view(FP8)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def edge_values() -> Tensor:
    """Every float8, the middles between neighbours, floats beside these, and what is too large."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, math.inf)]
    large = torch.tensor([449.0, 464.0, 480.0, 1e9, math.inf, 1e-30])
    positive = torch.cat((numbers, middles, *near, large))
    return torch.cat((positive, -positive))


def test_quantizing_is_to_the_nearest_and_saturates() -> None:
    x = torch.cat((edge_values(), torch.randn(3000) * 20))
    assert same_bits(reference.quantize_fp8(x, 1.0), nearest_float8(x))
    assert same_bits(reference.quantize_fp8(x, 4.0), nearest_float8(x / 4))
    assert reference.quantize_fp8(torch.tensor([math.nan]), 1.0).isnan().all()


def stored(op: object, qkv: Tensor, scales: tuple[float, float]) -> Tensor:
    """The cache after one token whose key and value heads are ``qkv``'s, unturned."""
    head_dim = qkv.shape[1] // 3
    cache = torch.zeros(1, 2, 1, 2, head_dim).to(FP8)
    cos, sin = torch.ones(1, 2, dtype=qkv.dtype), torch.zeros(1, 2, dtype=qkv.dtype)
    slots = torch.tensor([1])
    key_scale, value_scale = scales
    op.norm_rotary_store(  # type: ignore[attr-defined]
        *(qkv, 1, cos, sin, cache, slots), key_scale=key_scale, value_scale=value_scale
    )
    assert not cache[:, :, :, 0].view(torch.uint8).any(), "a slot that is nobody's was written"
    return cache[0, :, 0, 1]  # [2, head_dim]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_stores_the_same_bits(dtype: torch.dtype, scales: tuple[float, float]) -> None:
    native = native_ops()
    if native is None:
        pytest.skip("no C compiler here")
    x = torch.cat((edge_values(), torch.tensor([math.nan, -0.0]))).to(dtype)
    qkv = x.repeat(3)[None]  # a query, a key, a value
    found = stored(native, qkv, scales)
    for plane, scale in zip(found, scales, strict=True):
        assert same_bits(plane[:-2], reference.quantize_fp8(x, scale)[:-2])
        assert plane[-2].isnan()
    assert same_bits(found[:, :-2], stored(reference, qkv, scales)[:, :-2])


class Layer:
    """Keys and values of some requests, in a float32 cache and in one of float8."""

    query_lens = (1, 6, 0, 1, 40, 1)
    seq_lens = (9, 6, 0, 130, 61, 1)

    def __init__(
        self, dtype: torch.dtype, scales: tuple[float, float], head_dim: int = 64, ratio: int = 3
    ) -> None:
        num_blocks = sum(-(-seq_len // BLOCK_SIZE) for seq_len in self.seq_lens) + 2
        self.table = make_tables(self.seq_lens, BLOCK_SIZE, num_blocks)
        slots = make_metadata(self.seq_lens, self.seq_lens, self.table, BLOCK_SIZE).slot_mapping
        self.metadata = make_metadata(self.query_lens, self.seq_lens, self.table, BLOCK_SIZE, 2)
        self.key, self.value = torch.randn(2, len(slots), 2, head_dim).to(dtype)
        self.exact = make_cache(num_blocks, 3, 2, BLOCK_SIZE, head_dim).to(dtype)[:, 1]
        self.cache = make_cache(num_blocks, 3, 2, BLOCK_SIZE, head_dim).to(FP8)[:, 1]
        self.scales = scales
        ops.store_kv(self.key, self.value, self.exact, slots)
        key_scale, value_scale = scales
        ops.store_kv(
            *(self.key, self.value, self.cache, slots),
            key_scale=key_scale,
            value_scale=value_scale,
        )
        self.query = torch.randn(self.metadata.num_tokens, 2 * ratio, head_dim).to(dtype)
        self.scale = head_dim**-0.5

    def attend(self, cache: Tensor, scale: float) -> Tensor:
        return ops.paged_attention(
            *(self.query, cache, self.table, self.query_lens, self.seq_lens), scale=scale
        )


@pytest.mark.parametrize("scales", SCALES)
def test_the_scales_belong_to_the_products_and_to_the_result(scales: tuple[float, float]) -> None:
    layer = Layer(torch.float32, scales)
    key_scale, value_scale = scales
    # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    dequantized = layer.cache.float() * torch.tensor(scales).view(1, 2, 1, 1, 1)
    found = layer.attend(layer.cache, layer.scale * key_scale) * value_scale
    torch.testing.assert_close(found, layer.attend(dequantized, layer.scale))


@pytest.mark.parametrize("head_dim", [64, 80, 24])
@pytest.mark.parametrize("ratio", [1, 3, 7])
@pytest.mark.parametrize("name", ["cpu", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backends_of_the_cpu(name: str, dtype: torch.dtype, ratio: int, head_dim: int) -> None:
    layer = Layer(dtype, (1.0, 1.0), head_dim, ratio)
    backend = ATTENTION_BACKENDS.load(name)()
    backend.plan(layer.metadata)
    found = backend.run(
        layer.query, layer.cache, layer.metadata, AttentionOptions(scale=layer.scale)
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    expected = layer.attend(layer.cache, layer.scale)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [128, 96, 80, 64, 24])
@pytest.mark.parametrize("ratio", [1, 2, 5, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_read_as_its_number(dtype: torch.dtype, ratio: int, head_dim: int) -> None:
    """To the bit what a cache that has those numbers gives, in decodes and prompts."""
    layer = Layer(dtype, (1.0, 1.0), head_dim, ratio)
    codes = torch.randint(0x7F, layer.cache.shape) + 0x80 * torch.randint(2, layer.cache.shape)
    numbers = codes.to(torch.uint8).view(FP8)
    backend = ATTENTION_BACKENDS.load("native")()
    backend.plan(layer.metadata)
    found, expected = (
        backend.run(layer.query, cache, layer.metadata, AttentionOptions(scale=layer.scale / 64))
        for cache in (numbers, numbers.to(dtype))
    )
    assert found.abs().max() > 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_shows(dtype: torch.dtype) -> None:
    layer = Layer(dtype, (1.0, 1.0), head_dim=128, ratio=1)
    block = int(layer.table[-1, 0])  # of the last request, whose one token gives its value
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    layer.cache[block, 1, :, 0] = codes.view(FP8)
    backend = ATTENTION_BACKENDS.load("native")()
    backend.plan(layer.metadata)
    found = backend.run(
        layer.query, layer.cache, layer.metadata, AttentionOptions(scale=layer.scale)
    )
    last = sum(layer.query_lens) - 1
    torch.testing.assert_close(found[last], codes.view(FP8).to(dtype), equal_nan=True)


@pytest.mark.parametrize("scales", SCALES)
def test_error_against_a_cache_that_is_not_quantized(scales: tuple[float, float]) -> None:
    """Relative to the size of the result, for keys and values of a normal distribution.

    A number is off by 1/16 of itself at most, on average by 2.6 % of the root mean square.
    """
    layer = Layer(torch.float32, scales)
    key_scale, value_scale = scales
    found = layer.attend(layer.cache, layer.scale * key_scale) * value_scale
    exact = layer.attend(layer.exact, layer.scale)
    error = float((found - exact).norm() / exact.norm())
    assert 0.01 < error < 0.05
