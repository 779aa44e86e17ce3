"""Tests of the ops of multi-head latent attention: C against definitions, and the choice of form.

Refuses to know: layers, models (``test_latent_attention.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton_kernels import PackedWeight, WeightFormat, dispatch, reference
from baton_kernels.attention import ATTENTION_BACKENDS
from baton_kernels.attention.base import AttentionOptions, as_keys_and_values
from tests.covering import covering
from tests.numerics.paged import make_metadata, make_tables
from tests.numerics.tolerances import assert_close

BLOCK_SIZE = 8
# What the C sources call TILE and SPAN, in keys, and SHARED_SPAN: of many heads, where wide.
TILE, SPAN, SHARED_SPAN = 192, 576, 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("reference", "cpu", "native")
# Heads, rank, numbers that carry the position. Few heads are read key by key, many are packed, or
# taken where they lie: wide ones, and bfloat16 by matrices.
SHAPES = ((2, 32, 8), (16, 64, 16), (9, 20, 6), (12, 256, 64), (35, 512, 64))

pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here"),
]


class Texts:
    """Latents of texts in a cache that is NaN elsewhere, and the queries of all their tokens."""

    def __init__(
        self,
        lengths: Sequence[int],
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        block_size: int = BLOCK_SIZE,
    ) -> None:
        torch.manual_seed(0)
        self.lengths, (heads, self.rank, rotary_dim) = list(lengths), shape
        self.block_size, width = block_size, self.rank + rotary_dim
        num_blocks = sum(-(-length // block_size) for length in lengths) + 2
        self.table = make_tables(lengths, block_size, num_blocks)
        # Blocks of two layers, of which this is the second one.
        cache = torch.full((num_blocks, 2, block_size, width), torch.nan, dtype=dtype)[:, 1]
        slots = make_metadata(lengths, lengths, self.table, block_size).slot_mapping
        self.latents = torch.randn(len(slots), width).to(dtype)
        cache[slots // block_size, slots % block_size] = self.latents
        self.cache = cache
        self.queries = [torch.randn(length, heads, width).to(dtype) for length in lengths]

    def attend(self, chunks: Sequence[tuple[int, int, int]], backend: str) -> list[Tensor]:
        """Attend for (text, first token, end) as one step: ``[tokens, heads, rank]`` of each."""
        table = self.table[[text for text, _, _ in chunks]]
        lens, ends = [end - first for _, first, end in chunks], [end for *_, end in chunks]
        metadata = make_metadata(lens, ends, table, self.block_size)
        query = torch.cat([self.queries[text][first:end] for text, first, end in chunks])
        attention = ATTENTION_BACKENDS.load(backend)()
        attention.plan(metadata)
        cache = as_keys_and_values(self.cache)
        scale = query.shape[-1] ** -0.5
        out = attention.run(
            query, cache, metadata, AttentionOptions(scale=scale, value_dim=self.rank)
        )
        assert out.shape == (*query.shape[:2], self.rank)
        return list(torch.split(out, lens))


@pytest.mark.parametrize(
    ("threads", "backend", "dtype", "shape"),
    covering([1, 2], BACKENDS, DTYPES, SHAPES),
    indirect=["threads"],
    ids=str,
)
def test_every_backend_attends_over_latents(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    texts = Texts((700, 30, 1, 200), dtype, shape)
    chunks = [(0, 699, 700), (1, 22, 30), (2, 0, 1), (3, 150, 200)]
    for (text, first, end), out in zip(chunks, texts.attend(chunks, backend), strict=True):
        start = sum(texts.lengths[:text])
        keys = texts.latents[start : start + end].float()  # [end, width]
        queries = texts.queries[text][first:end].float() * keys.shape[1] ** -0.5
        scores = torch.einsum("thw,kw->htk", queries, keys)
        hidden = torch.arange(end) > torch.arange(first, end).unsqueeze(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("htk,kr->thr", weights, keys[:, : texts.rank])
        assert_close(out, expected.to(dtype))


@pytest.mark.parametrize(
    ("threads", "dtype", "shape", "block_size"),
    covering([1, 2], DTYPES, SHAPES, [BLOCK_SIZE, 32]),
    indirect=["threads"],
    ids=str,
)
def test_a_token_is_the_same_in_a_prompt_a_chunk_and_a_decode(
    dtype: torch.dtype, shape: tuple[int, int, int], block_size: int
) -> None:
    lengths = (1, TILE, SHARED_SPAN, SPAN + 1, 2 * SPAN + 9)
    texts = Texts(lengths, dtype, shape, block_size)
    whole = texts.attend([(text, 0, n) for text, n in enumerate(lengths)], "native")
    for text, length in enumerate(lengths):
        alone = texts.attend([(text, length - 1, length)], "native")[0]
        assert torch.equal(alone, whole[text][-1:])
        middle = length // 2
        chunk = texts.attend([(text, middle, length), (0, 0, 1)], "native")[0]
        assert torch.equal(chunk, whole[text][middle:])
    together = texts.attend([(text, n - 1, n) for text, n in enumerate(lengths)], "native")
    for text, out in enumerate(together):
        assert torch.equal(out, whole[text][-1:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_means_what_the_reference_means(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    num_tokens, heads, nope, rank, rotary_dim = 5, 3, 12, 20, 8
    query = torch.randn(num_tokens, heads, nope + rotary_dim).to(dtype)[..., nope:]
    latent = torch.randn(num_tokens, rank + rotary_dim).to(dtype)
    angles = torch.rand(num_tokens, rotary_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = torch.rand(rank).to(dtype)
    slots = torch.tensor([17, 3, -1, 8, 0])
    found = []
    for ops in (dispatch.native_ops(), reference):
        cache = torch.zeros(3, 2, BLOCK_SIZE, rank + rotary_dim, dtype=dtype)
        out = torch.zeros(num_tokens, heads, rank + rotary_dim, dtype=dtype)
        ops.norm_rotary_store_latent(  # type: ignore[union-attr]
            *(query, latent, cos, sin, cache[:, 1], slots),
            weight=weight,
            eps=1e-6,
            interleaved=interleaved,
            out=out[..., rank:],
        )
        assert not cache[:, 0].any()
        assert not out[..., :rank].any()
        assert out[..., rank:].any()
        assert cache[:, 1].any(-1).sum() == 4
        found.append((cache, out))
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])


def test_interleaved_pairs_are_those_of_complex_numbers() -> None:
    torch.manual_seed(0)
    query, latent = torch.randn(4, 2, 8), torch.randn(4, 24)
    angles = torch.rand(4, 4)
    turned = torch.view_as_complex(query.view(4, 2, 4, 2)) * torch.polar(
        torch.ones(4, 1, 4), angles.unsqueeze(1)
    )
    out = torch.empty(4, 2, 8)
    reference.norm_rotary_store_latent(
        *(query, latent, angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)),
        *(torch.zeros(1, BLOCK_SIZE, 24), torch.arange(4)),
        weight=torch.ones(16),
        eps=1e-6,
        interleaved=True,
        out=out,
    )
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("outputs", [5, 64, 75])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 130])
@pytest.mark.parametrize("format", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.FP16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_are_multiplied_with_their_own_outputs(
    dtype: torch.dtype, format: WeightFormat, num_tokens: int, outputs: int
) -> None:
    native = dispatch.native_ops()
    assert native is not None
    torch.manual_seed(0)
    groups, inputs, width = 3, 201, native.panel_width
    rows = torch.randn(groups, outputs, inputs) / inputs**0.5
    filled = functional.pad(rows, (0, 0, 0, -outputs % width)).flatten(0, 1)
    weight = PackedWeight.pack(filled, None, format, width)
    x = torch.randn(num_tokens, groups, inputs + 5).to(dtype)[..., 5:]
    out, expected = torch.zeros(2, num_tokens, groups, outputs + 3, dtype=dtype)
    native.grouped_packed_linear(x, weight, out[..., :outputs])
    reference.grouped_packed_linear(x, weight, expected[..., :outputs])
    assert_close(out, expected)
    assert not out[..., outputs:].any()  # nothing is written after a group's outputs
    alone = torch.zeros(1, groups, outputs, dtype=dtype)
    native.grouped_packed_linear(x[-1:], weight, alone)
    assert torch.equal(alone, out[-1:, :, :outputs])
