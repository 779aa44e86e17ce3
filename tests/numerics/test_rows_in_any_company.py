"""Tests that a row's bits do not depend on the other rows: ops in C, in every dtype.

Refuses to know: engines and requests (``test_results_in_any_company.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton_kernels import dispatch, reference
from baton_kernels.attention.base import AttentionOptions
from baton_kernels.attention.native import NativeAttention
from baton_kernels.reference import FP8
from tests.covering import covering
from tests.numerics.paged import make_cache, make_metadata, make_tables

BLOCK_SIZE, NUM_KV_HEADS = 8, 2
# What the C sources call TILE and SPAN, in keys.
TILE, SPAN = 192, 576
LENGTHS = (1, 2, TILE - 1, TILE, TILE + 1, SPAN, SPAN + 1, 2 * SPAN + 9)
# Size of a head, and query heads per KV head; many go a way of their own where it pays.
SHAPES = ((64, 2), (80, 7), (128, 1), (200, 3), (80, 9), (256, 8), (64, 17))
SINKS = {"sinks": 1.0}  # of each head
KINDS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32 over fp8": (torch.float32, FP8),
    "bfloat16 over fp8": (torch.bfloat16, FP8),
    "float16 over fp8": (torch.float16, FP8),
}

pytestmark = pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here")


class Texts:
    """Texts of the given lengths in a cache, and the queries of all their tokens."""

    def __init__(self, lengths: Sequence[int], kind: str, head_dim: int, ratio: int) -> None:
        torch.manual_seed(0)
        self.lengths = list(lengths)
        dtype, cache_dtype = KINDS[kind]
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 2
        self.table = make_tables(lengths, BLOCK_SIZE, num_blocks)
        slots = make_metadata(lengths, lengths, self.table, BLOCK_SIZE).slot_mapping
        cache = make_cache(num_blocks, 1, NUM_KV_HEADS, BLOCK_SIZE, head_dim)[:, 0]
        key, value = torch.randn(2, len(slots), NUM_KV_HEADS, head_dim)
        reference.store_kv(key * 2, value, cache, slots)
        self.cache = cache.to(cache_dtype)
        shape = (NUM_KV_HEADS * ratio, head_dim)
        self.queries = [torch.randn(length, *shape).to(dtype) for length in lengths]

    def attend(self, chunks: Sequence[tuple[int, int, int]], **options: float) -> list[Tensor]:
        """One step of the tokens [begin, end) of texts: each chunk's rows."""
        texts, lens = [text for text, _, _ in chunks], [end - begin for _, begin, end in chunks]
        metadata = make_metadata(lens, [end for _, _, end in chunks], self.table[texts], BLOCK_SIZE)
        query = torch.cat([self.queries[text][begin:end] for text, begin, end in chunks])
        backend = NativeAttention()
        backend.plan(metadata)
        sinks = torch.linspace(-1, 1, query.shape[1]) if options == SINKS else None
        options = {} if options == SINKS else options
        how = AttentionOptions(scale=0.2, sinks=sinks, **options)  # type: ignore[arg-type]
        out = backend.run(query, self.cache, metadata, how)
        return list(torch.split(out, lens))


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    covering(KINDS, SHAPES, [{}, {"sliding_window": 250}, {"soft_cap": 3.0}, SINKS]),
    ids=str,
)
def test_attention(kind: str, shape: tuple[int, int], options: dict[str, float]) -> None:
    """Compare decodes alone and together, and prompts in one chunk and in chunks of any size.

    One thread computes rows alone, two threads compute rows together.
    """
    texts = Texts(LENGTHS, kind, *shape)
    numbers = range(len(LENGTHS))
    torch.set_num_threads(2)
    whole = texts.attend([(text, 0, LENGTHS[text]) for text in numbers], **options)
    decoded = texts.attend(
        [(text, LENGTHS[text] - 1, LENGTHS[text]) for text in numbers], **options
    )
    torch.set_num_threads(1)
    for text, length in enumerate(LENGTHS):
        [alone] = texts.attend([(text, length - 1, length)], **options)
        assert torch.equal(alone, decoded[text])
        assert torch.equal(alone[0], whole[text][-1])
    longest = len(LENGTHS) - 1
    length, generator = LENGTHS[longest], torch.Generator().manual_seed(1)
    borders = torch.randperm(length - 1, generator=generator)[:9].add(1).sort().values.tolist()
    for number, (begin, end) in enumerate(zip([0, *borders], [*borders, length], strict=True)):
        torch.set_num_threads(1 + number % 2)
        chunk = texts.attend([(2, 0, LENGTHS[2]), (longest, begin, end)], **options)[1]
        assert torch.equal(chunk, whole[longest][begin:end])
    torch.set_num_threads(1)
    for row in (0, 5, TILE - 1, TILE, SPAN - 1, SPAN, SPAN + 249, length - 2):
        [alone] = texts.attend([(longest, row, row + 1)], **options)
        assert torch.equal(alone[0], whole[longest][row])
