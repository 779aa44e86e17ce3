"""Tests of attention kernels beyond the backends' contract: splits, tiles, capture, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor, interpreter_builder

from baton_kernels import reference
from baton_kernels.attention.base import AttentionMetadata, AttentionOptions
from baton_kernels.attention.triton import TritonAttention
from baton_kernels.triton import decode_attention, varlen_attention
from baton_kernels.triton.attention_tile import PagedShape
from baton_kernels.triton.decode_attention import DecodeBuffers, launch_plan
from baton_kernels.triton.fp8 import has_fp8
from baton_kernels.triton.tile_plan import plan_tiles
from baton_kernels.triton.varlen_attention import Tiles, bind_tiles
from tests.numerics.paged import make_cache, make_metadata, make_tables

pytestmark = pytest.mark.large

SCALE = 0.2
TILE = 64  # keys that a program computes at once, for heads of 128
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = ([1, 9, 0, 35, 1], [150, 9, 0, 56, 1])


@pytest.fixture(autouse=True)
def _on_device(device: torch.device) -> object:
    with torch.device(device):
        yield


class Layer:
    """One layer's inputs, its cache NaN wherever no token is."""

    def __init__(
        self,
        lens: tuple[Sequence[int], Sequence[int]],
        *,
        dtype: torch.dtype = torch.float32,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        num_padding: int = 0,
    ) -> None:
        query_lens, seq_lens = lens
        num_blocks = sum(-(-seq_len // block_size) for seq_len in seq_lens) + 2
        table = make_tables(seq_lens, block_size, num_blocks).to(torch.get_default_device())
        cache = make_cache(num_blocks, 2, num_kv_heads, block_size, head_dim)[:, 1]
        slots = make_metadata(seq_lens, seq_lens, table, block_size).slot_mapping
        key, value = torch.randn(2, len(slots), num_kv_heads, head_dim)
        reference.store_kv(key, value, cache, slots)
        self.kv_cache = cache.to(dtype)  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        self.metadata = make_metadata(query_lens, seq_lens, table, block_size, num_padding)
        num_tokens = self.metadata.num_tokens
        # As it comes from one projection of queries, keys and values: tokens lie apart.
        projected = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        self.query = projected[:, :num_heads]  # [num_tokens, num_heads, head_dim]

    def run(
        self,
        backend: TritonAttention | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        backend = backend or TritonAttention()
        backend.plan(self.metadata)
        return backend.run(
            self.query,
            self.kv_cache,
            self.metadata,
            AttentionOptions(scale=SCALE, sliding_window=window, soft_cap=soft_cap),
        )

    def check(
        self,
        out: Tensor,
        window: int | None = None,
        soft_cap: float | None = None,
        score_scale: float = 1.0,
    ) -> None:
        """Compare with the reference; rounding of a score, and so of a weight, grows with it."""
        metadata = self.metadata
        expected = reference.paged_attention(
            self.query,
            self.kv_cache,
            metadata.block_table,
            metadata.query_lens,
            metadata.seq_lens_host,
            scale=SCALE,
            sliding_window=window,
            soft_cap=soft_cap,
        )
        tolerance = TOLERANCE[out.dtype] * score_scale
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    layer = Layer(MIXED, dtype=dtype, head_dim=head_dim)
    layer.check(layer.run())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (20, 1)])
def test_any_group_of_heads(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    layer = Layer(MIXED, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads)
    layer.check(layer.run(window=25, soft_cap=0.5), window=25, soft_cap=0.5)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("lens", [([150], [150]), ([40], [233]), ([2, 61, 35], [270, 100, 35])])
def test_prompts_of_many_tiles(lens: tuple[list[int], list[int]], window: int | None) -> None:
    layer = Layer(lens, num_padding=2)
    layer.check(layer.run(window=window), window=window)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("block_size", [8, 32])
def test_long_decodes_are_split(block_size: int, window: int | None) -> None:
    layer = Layer(([1, 1, 1], [900, 3, 400]), block_size=block_size)
    layer.check(layer.run(window=window), window=window)


def test_scores_may_be_large() -> None:
    layer = Layer(MIXED)
    layer.query.mul_(10)
    layer.check(layer.run(), score_scale=10)


def test_blocks_that_slid_out_are_not_read() -> None:
    window = 20
    layer = Layer(([1, 10], [150, 100]))
    out = layer.run(window=window)
    layer.check(out, window=window)
    for row, num_out in ((0, (150 - window) // 16), (1, (100 - 10 - window + 1) // 16)):
        layer.metadata.block_table[row, :num_out] = 10**6  # nowhere
    assert torch.equal(layer.run(window=window), out)


def test_one_captured_size_serves_fewer_requests() -> None:
    """Replay as a CUDA graph does: the same tensors, new contents, and only the kernels run."""
    captured = Layer(([1] * 4, [150, 290, 17, 400]))
    backend = TritonAttention()
    captured.run(backend)
    buffers = dict(backend._buffers)
    smaller = Layer(([1, 1, 0, 0], [40, 700, 0, 0]), num_padding=2)
    live = smaller.metadata
    # The host's side stays that of the capture; a graph never sees it.
    replayed = replace(
        captured.metadata,
        query_start_loc=live.query_start_loc,
        seq_lens=live.seq_lens,
        block_table=live.block_table,
    )
    backend.plan(replayed)
    out = backend.run(smaller.query, smaller.kv_cache, replayed, AttentionOptions(scale=SCALE))
    smaller.check(out)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert backend._buffers == buffers, "a graph holds addresses of buffers that were given back"


def plan_of(
    lens: Sequence[tuple[int, int]], window: int | None, shape: PagedShape
) -> tuple[DecodeBuffers, AttentionMetadata]:
    query_lens, seq_lens = zip(*lens, strict=True)
    table = torch.zeros(len(lens), 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        num_requests=len(lens),
        num_tokens=sum(query_lens),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.empty(0),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens=query_lens,
        seq_lens_host=seq_lens,
    )
    buffers = DecodeBuffers.allocate(len(lens), shape, torch.empty(0, dtype=torch.float16))
    for table in (buffers.work, buffers.first_slot, buffers.program_slot):
        table.fill_(-7)
    launch_plan(buffers, metadata, window)
    return buffers, metadata


LENS = st.one_of(
    st.tuples(st.just(1), st.integers(1, 5000)),
    st.tuples(st.integers(2, 9), st.integers(9, 100)),
    st.just((0, 0)),
)


@settings(max_examples=15)  # each runs in the interpreter
@given(lens=st.lists(LENS, min_size=1, max_size=20), window=st.none() | st.integers(1, 3000))
def test_every_key_of_every_decode_is_in_one_slot(
    lens: list[tuple[int, int]], window: int | None
) -> None:
    buffers, _ = plan_of(lens, window, PagedShape(2, 2, 128, 16))
    first_slot = buffers.first_slot.tolist()
    work = buffers.work.tolist()
    assert first_slot == sorted(first_slot)
    assert first_slot[-1] <= len(work)
    for request, (query_len, seq_len) in enumerate(lens):
        slots = work[first_slot[request] : first_slot[request + 1]]
        if query_len != 1:
            assert not slots
            continue
        assert {(slot[0], slot[3]) for slot in slots} == {(request, len(slots))}
        assert all(start < end for _, start, end, _ in slots)
        bounds = [slots[0][1], *(end for _, _, end, _ in slots)]
        assert bounds[1:-1] == [start for _, start, _, _ in slots[1:]]
        assert bounds[0] == max(0, seq_len - (window or seq_len))
        assert bounds[-1] == seq_len
    programs = buffers.program_slot.tolist()
    assert (programs[0], programs[-1]) == (0, first_slot[-1])
    tiles = [
        sum(-(-(end - start) // TILE) for _, start, end, _ in work[first:last])
        for first, last in pairwise(programs)
    ]
    share = max(2, -(-sum(tiles) // len(tiles)))
    busy = [num for num in tiles if num]
    assert tiles[: len(busy)] == busy, "a program between others has nothing to do"
    assert set(busy[:-1]) <= {share}, "programs do not share evenly"
    assert not busy or busy[-1] <= share


@pytest.mark.parametrize(
    ("lens", "parts"),
    [
        ([8192], [6]),  # one long request fills all programs
        ([10] * 15 + [8192], [1] * 15 + [6]),
        ([384] * 6, [1] * 6),  # no request is split where every program gets a whole one
        ([384] * 7, [1, 2, 2, 2, 2, 2, 1]),
        ([128], [1]),  # merging would cost more than it saves
    ],
)
def test_six_programs_per_kv_head_share_all_tiles(lens: list[int], parts: list[int]) -> None:
    buffers, _ = plan_of([(1, length) for length in lens], None, PagedShape(2, 2, 128, 16))
    assert buffers.num_programs == 4 * 3 // 2, "4 multiprocessors, 3 programs each, 2 KV heads"
    first_slot = buffers.first_slot.tolist()
    assert [last - first for first, last in pairwise(first_slot)] == parts


def test_programs_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, three programs run on a multiprocessor, on an L4 only one."""
    for multiprocessors, kib, num_kv_heads, expected in (
        (132, 227, 4, 99), (132, 227, 8, 49), (108, 163, 8, 27), (58, 99, 8, 7), (58, 99, 100, 1),
    ):  # fmt: skip
        monkeypatch.setattr(
            decode_attention, "num_multiprocessors", lambda device, number=multiprocessors: number
        )
        monkeypatch.setattr(decode_attention, "shared_kib", lambda device, size=kib: size)
        found = decode_attention.programs_per_kv_head(num_kv_heads, 32, torch.device("cuda"))
        assert found == expected


@given(
    lens=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9000)), min_size=1, max_size=8),
    tokens_per_tile=st.sampled_from([1, 18, 32, 128]),
    window=st.none() | st.integers(1, 3000),
    num_programs=st.integers(1, 66),
)
def test_every_key_of_every_tile_is_in_one_part(
    lens: list[tuple[int, int]], tokens_per_tile: int, window: int | None, num_programs: int
) -> None:
    plan = plan_tiles(
        [query_len for query_len, _ in lens],
        [query_len + earlier for query_len, earlier in lens],
        tokens_per_tile=tokens_per_tile,
        keys_per_step=64,
        block_size=24,
        num_programs=num_programs,
        sliding_window=window,
    )
    sizes = [end - first for _, _, first, end, _ in plan.parts.tolist()]
    assert sizes == sorted(sizes, reverse=True)
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for request, first_new, *keys in plan.parts.tolist():
        found.setdefault((request, first_new), []).append(tuple(keys))
    merges = {(request, first_new): slots for request, first_new, *slots in plan.merges.tolist()}
    assert sum(num_parts for _, num_parts in merges.values()) == plan.num_slots
    for request, (query_len, earlier) in enumerate(lens):
        for first_new in range(0, query_len if query_len > 1 else 0, tokens_per_tile):
            parts = sorted(found.pop((request, first_new)))
            newest = earlier + min(first_new + tokens_per_tile, query_len)
            oldest = max(0, earlier + first_new + 1 - (window or 10**6))
            assert parts[0][0] == oldest // 24 * 24
            assert parts[-1][1] == newest
            assert all(first < end for first, end, _ in parts)
            assert all(one[1] == other[0] for one, other in pairwise(parts))
            assert all((end - first) % (64 * 3) == 0 for first, end, _ in parts[:-1])
            first_slot, num_parts = merges.pop((request, first_new), (-1, 1))
            slots = list(range(first_slot, first_slot + num_parts))
            assert [slot for _, _, slot in parts] == slots
    assert not found
    assert not merges


@pytest.mark.parametrize("window", [None, 1100])
def test_few_tiles_with_many_keys_are_split(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "num_multiprocessors", lambda device: 4)
    layer = Layer(([5, 12], [1250, 700]), num_heads=3, num_kv_heads=1)
    backend = TritonAttention()
    out = layer.run(backend, window=window)
    assert backend._tiles[window].num_slots == 6
    layer.check(out, window=window)


def test_a_row_may_see_no_key_of_a_part() -> None:
    layer = Layer(([8], [100]))
    out = torch.empty(8, 4, 64)
    # With a window of 4 no row sees the first part, and only the last ones see the third.
    bounds = [(0, 32), (32, 96), (96, 100)]
    parts = torch.tensor([[0, 0, *keys, slot] for slot, keys in enumerate(bounds)])
    merges = torch.tensor([[0, 0, 0, 3]])
    tiles = Tiles(parts.to(torch.int32), merges.to(torch.int32), num_slots=3)
    bound = bind_tiles(layer.query, layer.kv_cache, layer.metadata, tiles, SCALE, 4, None)
    bound.launch(out, layer.query, layer.kv_cache, None)
    layer.check(out, window=4)


# Heads that are and that are no power of two, and how many parts of them are merged at once.
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "at_once"), [(3, 80, 8), (1, 256, 16), (5, 64, 8)]
)
def test_merging_many_parts(
    num_heads: int, head_dim: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda device: 6)
    lens = ([1, 0, 1], [2400, 0, 20])
    layer = Layer(lens, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim)
    backend = TritonAttention()
    out = layer.run(backend)
    (buffers,) = backend._buffers.values()
    firsts = buffers.first_slot.tolist()
    assert firsts[1] - firsts[0] > at_once
    layer.check(out)


def shuffle_programs(monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    """Run programs in a random order, because a GPU finishes programs in any order."""
    order = torch.randperm(num_programs, device="cpu").tolist()
    set_grid_idx = interpreter_builder.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        is_planning = interpreter_builder.grid_dim[1] != num_programs
        set_grid_idx(x, y if is_planning else order[y], z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", shuffled)


@pytest.mark.parametrize("cache", [torch.float32, reference.FP8], ids=["float32", "float8"])
def test_the_last_part_to_arrive_merges(
    cache: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each part arrive last, then run again with the same buffers, as a replayed graph does."""
    if device.type == "cuda" and not (cache == torch.float32 or has_fp8(device)):
        pytest.skip("this GPU has no float8")
    layer = Layer(([1, 1, 1, 0], [500, 3, 300, 0]), num_padding=1)
    # Numbers that are float8 as they are: the interpreter converts no others.
    exact = layer.kv_cache.where(layer.kv_cache.isnan(), layer.kv_cache.sign())
    layer.kv_cache = exact.to(cache)
    backend = TritonAttention()
    first = layer.run(backend)
    layer.check(first)
    assert torch.equal(first[3:], torch.zeros_like(first[3:]))
    (buffers,) = backend._buffers.values()
    parts = buffers.work[:, 3].tolist()
    assert parts[0] > 2, "nothing was split"
    assert 1 in parts, "all was split"
    for _ in range(2):
        assert not buffers.arrived.any(), "the next launch would merge too early"
        if device.type == "cpu":
            # With float8, each part has a program of its own.
            is_fp8 = cache == reference.FP8
            shuffle_programs(monkeypatch, len(buffers.work) if is_fp8 else buffers.num_programs)
        again = layer.run(backend)
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        monkeypatch.undo()
    assert not buffers.arrived.any()


def test_a_layer_of_decodes_is_one_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches become nodes of a CUDA graph; a layer is one of them, whatever is split."""
    if device.type == "cuda":
        pytest.skip("launches are counted in the interpreter")
    launched: list[str] = []
    call = GridExecutor.__call__

    def count(self: GridExecutor, *arguments: object, **options: object) -> object:
        launched.append(self.fn.__name__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    layer = Layer(([1, 1], [300, 3]))
    backend = TritonAttention()
    backend.plan(layer.metadata)
    for _ in range(2):  # layers
        backend.run(layer.query, layer.kv_cache, layer.metadata, AttentionOptions(scale=SCALE))
    assert launched == ["plan_decodes", *["decode_attention"] * 2]
