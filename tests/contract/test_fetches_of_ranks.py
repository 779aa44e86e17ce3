"""Tests that a cached prefix of any kind of KV reaches nodes with any number of ranks unchanged.

Shares, fetches, caches and connectors are real. Only the engines are missing: the test fills the
holder's cache as a model would.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.api.sampling_params import SamplingParams
from baton.kv.block_hash import BlockHasher
from baton.kv.layers import LatentKV, LayerKV, PagedKV, StateArray, StateKV
from baton.kv.prefixes import fetch_end, share_end
from baton.link.words import PeerReport, PrefillCommand, ShareCommand
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.side_blocks import SideBlocks
from engine.engine import Engine
from engine.worker.kv_cache import KVMemory, kv_cache_spec
from kvconnector.ends import Receiver, Sender
from node_runtime.inbox import Outbox
from node_runtime.prefixes.fetches import Fetches
from node_runtime.prefixes.prefix_wait import PrefixWait
from node_runtime.prefixes.shares import Shares
from tests.contract.test_kv_connectors_of_ranks import Node, arrays_of, node
from tests.fakes.handoff.kv_link import numbers
from tests.fakes.time.waiting import wait_until

NUM_BLOCKS, BLOCK_SIZE, WINDOW = 16, 4, 8
# Tokens of the prompt; numbers of its tokens that the holder and the reader have cached
PROMPT, NUM_HELD, NUM_OWN = list(range(5, 30)), 20, 8
RANKS = (1, 2, 4)
SHAPES = list(itertools.product(RANKS, RANKS))


@dataclass(frozen=True)
class Kind:
    """A kind of KV: the layers of a model, and how their numbers are stored."""

    layers: list[LayerKV]
    dtype: torch.dtype = torch.float32
    by_heads: bool = False

    def memory(self, shape: tuple[int, int], rank: int) -> KVMemory:
        """Return the memory of one rank; ``shape`` is as in `test_kv_connectors_of_ranks`."""
        scales = [(1.0, 1.0)] * len(self.layers) if self.dtype.itemsize == 1 else ()
        spec = kv_cache_spec(
            *(self.layers, BLOCK_SIZE, self.dtype, scales, torch.float32),
            ranks=(rank, shape[0]),
            by_heads=self.by_heads,
        )
        size = (NUM_BLOCKS, *spec.block_shape)
        return KVMemory(spec, torch.zeros(size, dtype=spec.tensor_dtype))


KINDS = {
    "heads": Kind([PagedKV(4, 8)] * 2),
    "fewer heads than ranks": Kind([PagedKV(2, 8)] * 2),
    "by heads": Kind([PagedKV(4, 16)] * 2, by_heads=True),
    "windows": Kind([PagedKV(4, 8), PagedKV(4, 8, sliding_window=WINDOW)]),
    "states": Kind([PagedKV(4, 8), StateKV((StateArray((4, 3, 5)), StateArray((4, 3))))]),
    "latent": Kind([LatentKV(12)] * 2),
    "fp8": Kind([PagedKV(4, 16)] * 2, torch.float8_e4m3fn),
}


def values_of(kind: Kind, layer: int, number: int, mark: int) -> torch.Tensor:
    """Return the numbers of a block in one array of a layer, for a node with one rank."""
    draw = torch.Generator().manual_seed(1000 * layer + 100 * number + mark)
    views = {(one, which): view for one, _, which, _, view in arrays_of(kind.memory((1, 1), 0))}
    found = torch.randint(0, 16, views[layer, number].shape[1:], generator=draw)
    return found.to(torch.float32).to(views[layer, number].dtype)


def slices_of(
    kind: Kind, memories: list[KVMemory], block_id: int, group: int, mark: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a block's arrays in each rank's memory, each with the numbers that it must have."""
    for rank, memory in enumerate(memories):
        for layer, of_group, number, axis, view in arrays_of(memory):
            if of_group != group:
                continue
            value = values_of(kind, layer, number, mark)
            if axis is not None:
                array = next(g for g in memory.manifest.groups if layer in g.layers).arrays[number]
                size = array.shape[axis]
                first = rank * size // len(memories)
                value = value.narrow(axis, first, view.shape[axis + 1])
            yield view[block_id], value


@dataclass
class Cached:
    """The parts of a node that prefixes need: memories and a prefix cache, but no model."""

    kind: Kind
    node: Node
    resumed: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self.node.memories[0].spec
        hasher = BlockHasher(BLOCK_SIZE, "sha256", namespace=b"model")
        windows = self.spec.sliding_windows
        self.manager = KVCacheManager(
            NUM_BLOCKS, BLOCK_SIZE, sliding_windows=windows, hasher=hasher
        )
        self.pool = self.manager.block_pool
        features = SimpleNamespace(side_blocks=SideBlocks(self.pool), end_fetch=self.resumed.append)
        found = SimpleNamespace(
            block_pool=self.pool,
            kv_cache_manager=self.manager,
            kv_memory=self.node.memories[0],
            features=features,
        )
        self.engine = cast("Engine", found)

    def request(self, request_id: str, num_tokens: int = len(PROMPT)) -> Request:
        made = Request.create(
            *(request_id, PROMPT[:num_tokens], SamplingParams(max_tokens=1)),
            seed=0,
            eos_token_ids=frozenset(),
            max_model_len=100,
        )
        self.manager.find_cached_blocks(made)
        return made

    def fill(self, num_tokens: int, first: int = 0) -> None:
        """Cache the prompt's first tokens with their KV, from block ``first`` on."""
        groups, num_blocks = self.manager.num_groups, num_tokens // BLOCK_SIZE
        request = self.request("computed")
        blocks = [self.manager.coordinator.null_block or 0] * (num_blocks * groups)
        places = [one for one in self.manager.handoff_places(num_tokens) if one >= first * groups]
        taken = self.pool.allocate(len(places))
        assert taken is not None
        for place, block_id in zip(places, taken, strict=True):
            blocks[place] = block_id
            for view, value in self._slices(place, block_id):
                view.copy_(value)
        hashes = request.block_hashes[:num_blocks]
        self.manager.coordinator.cache(blocks, hashes, first, num_blocks)
        self.pool.release(reversed(taken))

    def _slices(self, place: int, block_id: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        group = place % self.manager.num_groups
        return slices_of(self.kind, self.node.memories, block_id, group, place)

    def check(self, num_tokens: int) -> None:
        """Assert that the prompt's first tokens are cached with the right numbers in all blocks."""
        hit = self.manager.find_cached_blocks(self.request("next"))
        assert len(hit) // self.manager.num_groups * BLOCK_SIZE == num_tokens
        for place in self.manager.handoff_places(num_tokens):
            for view, value in self._slices(place, hit[place]):
                assert torch.equal(view.to(torch.float32), value.to(torch.float32)), place


@contextmanager
def cached(kind: Kind, connector: str, name: str, num_ranks: int) -> Iterator[Cached]:
    with node(connector, name, (num_ranks, 1), kind.memory) as found:
        yield Cached(kind, found)


def bring(
    shares: Shares,
    fetches: Fetches,
    ends: tuple[Sender, Receiver],
    reader: Cached,
    names: list[str],
) -> PrefixWait:
    """Connect both ends, ask for a prefix, and wait until it is received or lost."""
    shares.add_peer(ends[1].peer_info)
    fetches.incoming.add_peer(ends[0].peer_info)
    outbox, reports = Outbox(lambda event: None), list[Any]()
    outbox.emit = reports.append

    def connected() -> bool:
        shares.step(outbox)
        reports.extend(fetches.incoming.step())
        good = [one for one in reports if not isinstance(one, PeerReport) or one.connected]
        return len(good) == 2

    wait_until(connected, "both ends are connected")
    request = reader.request("r")
    command = PrefillCommand(
        request_id="r",
        epoch=0,
        prompt_token_ids=PROMPT,
        sampling_params=request.sampling_params,
        timeout_s=30.0,
        decode_engine_id="",
        fetch_engine_id=names[0],
        fetch_num_tokens=NUM_HELD,
    )
    wait = fetches.expect(request, command, time.monotonic())
    told = ShareCommand(
        request_id="r",
        epoch=0,
        reader_engine_id=names[1],
        timeout_s=30.0,
        prompt_token_ids=PROMPT[:NUM_HELD],
    )
    shares.share_prefix(told, time.monotonic())

    def ended() -> bool:
        shares.step(outbox)
        fetches.incoming.step()
        return bool(reader.resumed)

    wait_until(ended, "the fetch has ended")
    assert wait is not None
    return wait


def fetch(kind: Kind, connector: str, ranks: tuple[int, int], *, digests: bool) -> None:
    """Fetch the part of a prefix that the reader lacks; compare all numbers of the prefix."""
    names, deaths = [f"{role}{next(numbers)}" for role in ("holder", "reader")], list[Exception]()
    ends = share_end(names[0]), fetch_end(names[1])
    with ExitStack() as stack:
        holder, reader = (
            stack.enter_context(cached(kind, connector, end, num))
            for end, num in zip(ends, ranks, strict=True)
        )

        def open_end(of: Any, one: Cached) -> Any:
            checks = one.node.digests if digests else None
            end = of(one.node.transport, lambda: None, deaths.append, digests=checks)
            end.loop.start()
            stack.callback(end.close)
            return end

        sender, receiver = open_end(Sender, holder), open_end(Receiver, reader)
        shares = Shares(holder.engine, sender)
        fetches = Fetches(reader.engine, receiver, timeout_s=30.0)
        holder.fill(NUM_HELD)
        reader.fill(NUM_OWN)
        wait = bring(shares, fetches, (sender, receiver), reader, names)
        assert (wait.num_tokens, wait.is_lost) == (NUM_HELD - NUM_OWN, False)
        reader.check(NUM_HELD)

        def at_rest() -> bool:
            shares.step(Outbox(lambda event: None))
            return not shares.num_transfers

        wait_until(at_rest, "nothing is sent")
        for one in (holder, reader):
            one.pool.check()
            null = one.manager.coordinator.null_block
            assert set(one.pool.ref_counts()) == ({null} if null is not None else set())
    assert deaths == []


@pytest.mark.nixl
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(1, 2), (4, 1)], ids=str)
def test_a_prefix_arrives_whole(kind: str, ranks: tuple[int, int]) -> None:
    fetch(KINDS[kind], "nixl", ranks, digests=True)


@pytest.mark.large
@pytest.mark.nixl
@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", SHAPES, ids=str)
def test_any_numbers_of_ranks_fetch_any_kind(
    ranks: tuple[int, int], kind: str, digests: bool
) -> None:
    fetch(KINDS[kind], "nixl", ranks, digests=digests)
