"""Contract of attention backends: a backend gives the results of `baton_kernels.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels import reference
from baton_kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionOptions

BLOCK_SIZE = 16
SCALE = 0.25
# (tokens to compute, tokens computed before) of each request.
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "a prompt": ([7], [7]),
    "a chunk": ([5], [23]),
    "decodes": ([1, 1, 1, 1, 1], [1, 16, 17, 40, 17]),
    "far apart": ([1, 1, 1], [130, 3, 310]),
    "mixed": ([1, 6, 1, 4, 1], [9, 6, 30, 21, 1]),
}


def make_tables(seq_lens: Sequence[int], block_size: int, num_blocks: int, seed: int = 0) -> Tensor:
    """Return a block table of blocks in random order, `[num_requests, max_blocks]` int32.

    Entries after a request's last block are -1.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator, device="cpu").tolist()
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    table = torch.full((len(seq_lens), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table


def make_metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    block_size: int,
    num_padding: int = 0,
) -> AttentionMetadata:
    """Return the metadata of a step whose requests compute their last ``query_len`` tokens."""
    slots: list[int] = []
    for row, query_len, seq_len in zip(table.tolist(), query_lens, seq_lens, strict=True):
        positions = range(seq_len - query_len, seq_len)
        slots += [row[p // block_size] * block_size + p % block_size for p in positions]
    slots += [-1] * num_padding
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionMetadata(
        num_requests=len(query_lens),
        num_tokens=len(slots),
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
    )


def make_cache(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> Tensor:
    """Return a block-major KV cache full of NaN, which show reads of slots never written."""
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    return torch.full(shape, torch.nan)


class AttentionContract:
    """Tests of an attention backend for keys and values, in float32.

    Attributes:
        shapes: shapes to test: (key-value heads, query heads per key-value head, head size).
        device: device of queries and cache.
    """

    shapes: Sequence[tuple[int, int, int]] = ((2, 2, 24), (1, 8, 80), (3, 1, 64))
    device = "cpu"

    def make(self) -> AttentionBackend:
        """Return a new backend."""
        raise NotImplementedError

    def test_it_equals_the_reference(self) -> None:
        for lens in STEPS.values():
            for window in (None, 4, 1000):
                self._check(self.make(), lens, self.shapes[0], window)

    def test_it_takes_any_shape(self) -> None:
        for shape in self.shapes:
            self._check(self.make(), STEPS["mixed"], shape, None)

    def test_one_plan_serves_layers_with_and_without_a_window(self) -> None:
        backend = self.make()
        for window in (None, 3, None):
            self._check(backend, STEPS["mixed"], self.shapes[0], window)

    def test_padding_tokens_come_back_as_zeros(self) -> None:
        out = self._check(self.make(), STEPS["mixed"], self.shapes[0], None, num_padding=3)
        assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))

    def _check(
        self,
        backend: AttentionBackend,
        lens: tuple[list[int], list[int]],
        shape: tuple[int, int, int],
        window: int | None,
        num_padding: int = 0,
    ) -> Tensor:
        """Compare one layer of a random step with the reference; return the backend's result."""
        torch.manual_seed(0)
        (query_lens, seq_lens), (num_kv_heads, ratio, head_dim) = lens, shape
        with torch.device(self.device):
            num_blocks = sum(-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens) + 3
            table = make_tables(seq_lens, BLOCK_SIZE, num_blocks)
            cache = make_cache(num_blocks, 3, num_kv_heads, BLOCK_SIZE, head_dim)[:, 1]
            known = make_metadata(seq_lens, seq_lens, table, BLOCK_SIZE).slot_mapping
            key, value = torch.randn(2, len(known), num_kv_heads, head_dim)
            reference.store_kv(key, value, cache, known)
            metadata = make_metadata(query_lens, seq_lens, table, BLOCK_SIZE, num_padding)
            query = torch.randn(metadata.num_tokens, num_kv_heads * ratio, head_dim)
            backend.plan(metadata)
            options = AttentionOptions(scale=SCALE, sliding_window=window)
            out = backend.run(query, cache, metadata, options)
            expected = reference.paged_attention(
                query, cache, table, metadata.query_lens, metadata.seq_lens_host,
                scale=SCALE, sliding_window=window,
            )  # fmt: skip
        torch.testing.assert_close(out, expected)
        return out
