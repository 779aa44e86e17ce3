"""Tests that batch-invariant kernels give a token the same bits whatever else is in the batch.

Triton's interpreter multiplies by numpy, which adds by where in a tile a row stands; a matrix unit
does not. There sums are made in float64 and rounded, which leaves no trace of an order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from triton.runtime.interpreter import TensorHandle, interpreter_builder

from baton_kernels import FP8, Routing, reference
from baton_kernels.attention.base import AttentionOptions
from baton_kernels.attention.triton_invariant import InvariantTritonAttention
from baton_kernels.row_tiles import RowTiles
from baton_kernels.triton.experts import experts
from baton_kernels.triton.invariant import attention, linear
from tests.covering import covering
from tests.kernels.poison import poisoned_memory as poisoned_memory
from tests.numerics.paged import make_cache, make_metadata, make_tables

pytestmark = pytest.mark.large

# Some texts have parts of 64, others of 128 and 256.
LEAST_PART, MOST_PARTS = 64, 2
LENGTHS = (1, 64, 70, 129, 262)
SHAPES = ((64, 2), (80, 3), (256, 1))  # of a head, and query heads per KV head
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():  # the interpreter computes it wrongly
    DTYPES.append(torch.bfloat16)
SINKS = {"sinks": 1.0}  # of each head
LINEAR_SHAPES = [(200, 1100), (64, 64), (384, 1024)]  # outputs and inputs, in parts and whole


@contextlib.contextmanager
def sums_without_order() -> Iterator[None]:
    """Have the interpreter's products be what a matrix unit's are: the same in any row."""
    known = interpreter_builder.create_dot

    def dot(a: TensorHandle, b: TensorHandle, total: TensorHandle, *_: object) -> TensorHandle:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(product.astype(np.float32) + total.data, total.dtype.scalar)

    interpreter_builder.create_dot = dot
    yield
    interpreter_builder.create_dot = known


@pytest.fixture(autouse=True)
def _on_device(device: torch.device) -> Iterator[None]:
    with torch.device(device), sums_without_order():
        yield


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Texts of hundreds of tokens have parts of several sizes."""
    monkeypatch.setattr(attention, "LEAST_PART", LEAST_PART)
    monkeypatch.setattr(attention, "MOST_PARTS", MOST_PARTS)
    attention._launcher.cache_clear()
    yield
    attention._launcher.cache_clear()


class Texts:
    """Texts of the given lengths in a cache, and the queries of all their tokens."""

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, cache_dtype: torch.dtype,
        head_dim: int, ratio: int,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        num_kv_heads, self.block_size = 2, 16
        num_blocks = sum(-(-length // self.block_size) for length in lengths) + 2
        self.table = make_tables(lengths, self.block_size, num_blocks)
        slots = make_metadata(lengths, lengths, self.table, self.block_size).slot_mapping
        cache = make_cache(num_blocks, 1, num_kv_heads, self.block_size, head_dim)[:, 0]
        key, value = torch.randn(2, len(slots), num_kv_heads, head_dim)
        reference.store_kv(key * 2, value, cache, slots)
        # The interpreter makes zeros of the smallest numbers of float8.
        self.cache = torch.where(cache.abs() < 2**-6, 0, cache).to(cache_dtype)
        shape = (num_kv_heads * ratio, head_dim)
        self.queries = [torch.randn(length, *shape).to(dtype) for length in lengths]
        self.backend = InvariantTritonAttention()

    def attend(self, chunks: Sequence[tuple[int, int, int]], **options: Any) -> list[Tensor]:
        """One step of the tokens [begin, end) of texts: each chunk's rows."""
        texts, lens = [text for text, _, _ in chunks], [end - begin for _, begin, end in chunks]
        ends, table = [end for _, _, end in chunks], self.table[texts]
        metadata = make_metadata(lens, ends, table, self.block_size, num_padding=2)
        query = torch.cat([self.queries[text][begin:end] for text, begin, end in chunks])
        query = torch.cat([query, query.new_zeros(2, *query.shape[1:])])
        self.backend.plan(metadata)
        if "sinks" in options:
            options = {"sinks": torch.linspace(-1, 1, query.shape[1])}
        out = self.backend.run(query, self.cache, metadata, AttentionOptions(scale=0.2, **options))
        expected = reference.paged_attention(
            *(query, self.cache.float(), table, metadata.query_lens, metadata.seq_lens_host),
            scale=0.2, **options,
        )  # fmt: skip
        tolerance = 1e-4 if query.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, expected.to(out.dtype), rtol=tolerance, atol=tolerance)
        return list(torch.split(out, [*lens, 2]))[:-1]


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "shape", "options"),
    covering(DTYPES, [None, FP8], SHAPES, [{}, {"sliding_window": 100}, {"soft_cap": 3.0}, SINKS]),
    ids=str,
)
def test_attention(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    shape: tuple[int, int],
    options: dict[str, Any],
) -> None:
    """Compare decodes alone and together, and prompts in one chunk and in chunks of any size."""
    texts = Texts(LENGTHS, dtype, cache_dtype or dtype, *shape)
    numbers = range(len(LENGTHS))
    whole = texts.attend([(text, 0, LENGTHS[text]) for text in numbers], **options)
    decoded = texts.attend(
        [(text, LENGTHS[text] - 1, LENGTHS[text]) for text in numbers], **options
    )
    for text, length in enumerate(LENGTHS):
        [alone] = texts.attend([(text, length - 1, length)], **options)
        assert torch.equal(alone, decoded[text])
        assert torch.equal(alone[0], whole[text][-1])
    longest = len(LENGTHS) - 1
    borders = [0, 1, 40, 127, 250, LENGTHS[longest]]
    for begin, end in pairwise(borders):
        chunk = texts.attend([(1, 20, 26), (longest, begin, end)], **options)[1]
        assert torch.equal(chunk, whole[longest][begin:end])
    for row in (0, 63, 64, 128, 255, 256):
        [alone] = texts.attend([(longest, row, row + 1)], **options)
        assert torch.equal(alone[0], whole[longest][row])


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 700)), min_size=1, max_size=5),
    st.sampled_from([1, 9, 16, 64]),
)
def test_a_tile_has_parts_of_one_size(
    requests: list[tuple[int, int]], tokens_per_tile: int
) -> None:
    query_lens = [new for new, _ in requests]
    seq_lens = [new + earlier for new, earlier in requests]
    tiles = attention.cut_prompts(query_lens, seq_lens, tokens_per_tile)
    covered: dict[int, list[int]] = {}
    for request, first, end in tiles:
        assert 0 < end - first <= tokens_per_tile
        earlier = seq_lens[request] - query_lens[request]
        seen = range(earlier + first + 1, earlier + end + 1)
        assert len({attention.part_keys(num_keys) for num_keys in seen}) == 1
        covered.setdefault(request, []).extend(range(first, end))
    expected = {number: list(range(new)) for number, new in enumerate(query_lens) if new > 1}
    assert {request: sorted(tokens) for request, tokens in covered.items()} == expected


@pytest.mark.parametrize(("out_features", "in_features"), LINEAR_SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) / 30).to(dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    # As from one projection of several things: rows lie apart.
    x = torch.randn(150, in_features + 16).to(dtype)[:, :in_features]
    arrived = torch.zeros(out_features, dtype=torch.int32)
    whole = linear.invariant_linear(x, weight, bias, arrived)
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.float(), wide, rtol=tolerance, atol=tolerance)
    for begin, end in ((0, 1), (3, 4), (5, 69), (9, 73), (10, 75), (20, 148), (149, 150)):
        rows = linear.invariant_linear(x[begin:end], weight, bias, arrived)
        assert torch.equal(rows, whole[begin:end])
        assert not arrived.any()
    assert linear.invariant_linear(x[:0], weight, bias, arrived).shape == (0, len(weight))


def test_as_many_parts_as_the_weight_says_and_programs_want() -> None:
    tile = linear._FEW
    assert linear.steps_of_part(4096, 64, tile) == 8  # 32 tiles of 8 parts
    assert linear.steps_of_part(152_000, 64, tile) == 64
    assert linear.steps_of_part(64, 10, tile) == 5  # not less than four steps


def test_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums without order hide the size of a tile, which may decide one on a GPU: there is one."""
    torch.manual_seed(0)
    sizes = set[int]()

    def count(ids: Tensor, num_experts: int, tile_rows: int) -> RowTiles:
        sizes.add(tile_rows)
        return made(ids, num_experts, tile_rows)

    made = RowTiles.of
    monkeypatch.setattr(RowTiles, "of", count)
    hidden, inner, num_experts, num_tokens = 64, 48, 4, 70
    gate_up = (torch.randn(num_experts, 2 * inner, hidden) / 8).to(dtype)
    down = (torch.randn(num_experts, hidden, inner) / 8).to(dtype)
    x = torch.randn(num_tokens, hidden).to(dtype)
    ids, weights = reference.route(torch.randn(num_tokens, num_experts), Routing(2))
    whole = experts(x, ids, weights, gate_up, down, invariant=True)
    for begin, end in ((0, 1), (7, 8), (3, 20), (2, 69)):
        rows = (x[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(experts(*rows, gate_up, down, invariant=True), whole[begin:end])
    assert len(sizes) == 1
    experts(x[:1], ids[:1], weights[:1], gate_up, down)
    assert len(sizes) == 2
