"""Contract of KV connectors between nodes of several ranks: each byte arrives where it belongs.

The ranks' transports are real, each on a thread of its own, as it is in a process of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kv.layers import LatentKV, LayerKV, PagedKV, StateArray, StateKV
from engine.worker.kv_cache import KVCacheSpec, KVMemory, kv_cache_spec
from kvconnector.base import KVReservation
from kvconnector.block_digests import BlockDigests
from kvconnector.ends import Receiver, Sender
from kvconnector.ranks.messages import Open
from kvconnector.ranks.service import RankService, open_transport
from kvconnector.ranks.transport import RanksTransport
from kvconnector.transports.base import KVTransport
from models.base import LayerCache
from tests.fakes.handoff.kv_link import Kind, Link, numbers

pytestmark = pytest.mark.medium

CONNECTORS = ["in_memory", pytest.param("nixl", marks=pytest.mark.nixl)]
NUM_BLOCKS, BLOCK_SIZE = 10, 4
Shape = tuple[int, int]  # ranks of a stage, stages

HEADS = st.sampled_from([1, 2, 3, 4, 8, 16])
SHAPES = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2]))


def paged(heads: int) -> list[LayerKV]:
    return [PagedKV(heads, 8)] * 4


def windowed(heads: int) -> list[LayerKV]:
    return [PagedKV(heads, 8), PagedKV(heads, 8, sliding_window=8)] * 2


def latent(heads: int) -> list[LayerKV]:
    return [LatentKV(12)] * 4


def states(heads: int) -> list[LayerKV]:
    kept = StateKV((StateArray((heads, 6, 5)), StateArray((heads, 3))))
    return [PagedKV(heads, 8), kept, kept, PagedKV(heads, 8)]


def by_heads(heads: int) -> list[LayerKV]:
    return [PagedKV(heads, 16)] * 4


def whole_spec(layers: list[LayerKV], shape: Shape, rank: int) -> KVCacheSpec:
    stage, place = divmod(rank, shape[0])
    return kv_cache_spec(
        layers,
        BLOCK_SIZE,
        torch.float32,
        ranks=(place, shape[0]),
        stages=(stage, shape[1]),
        by_heads=isinstance(layers[0], PagedKV) and layers[0].head_dim == 16,
    )


def memory_of(layers: list[LayerKV], shape: Shape, rank: int) -> KVMemory:
    spec = whole_spec(layers, shape, rank)
    size = (NUM_BLOCKS, *spec.block_shape)
    return KVMemory(spec, torch.zeros(size, dtype=spec.tensor_dtype))


def arrays_of(memory: KVMemory) -> Iterator[tuple[int, int, int, int | None, torch.Tensor]]:
    """(layer, group, number of the array, the axis that ranks divide, its view) of one rank."""
    caches: tuple[LayerCache, ...] = memory.spec.layer_caches(memory.tensor)
    for index, group in enumerate(memory.spec.groups):
        arrays = memory.manifest.groups[index].arrays
        for layer in group.layers:
            cache = caches[layer]
            views = cache if isinstance(cache, tuple) else (cache,)
            if all(len(view) for view in views):
                for number, (array, view) in enumerate(zip(arrays, views, strict=True)):
                    yield layer, index, number, array.shard_axis, view


def fill(
    layers: list[LayerKV],
    shape: Shape,
    memories: list[KVMemory],
    marks: dict[int, int],
    groups: dict[int, int],
) -> None:
    """Write what a prefill would have written; a block's mark is in all its numbers.

    Args:
        marks: mark of each block to write, by block id.
        groups: KV group by block id; a missing block belongs to group 0.
    """
    whole = memory_of(layers, (1, 1), 0)
    values: dict[tuple[int, int], torch.Tensor] = {}
    for layer, _, number, _, view in arrays_of(whole):
        places = torch.arange(view[0].numel(), dtype=torch.float32).view(view.shape[1:])
        values[layer, number] = places + 1000 * layer + 100_000 * number
    for rank, memory in enumerate(memories):
        for layer, group, number, axis, view in arrays_of(memory):
            value = values[layer, number]
            if axis is not None:
                array = next(g for g in memory.manifest.groups if layer in g.layers).arrays[number]
                size = array.shape[axis]
                first = rank % shape[0] * size // shape[0]
                value = value.narrow(axis, first, view.shape[axis + 1])
            for block_id, mark in marks.items():
                if groups.get(block_id, 0) == group:
                    view[block_id] = value + 0.5 * mark


@dataclass
class Node:
    """The memories of all ranks of a node, and its transport."""

    memories: list[KVMemory]
    transport: KVTransport
    ranks: RanksTransport | None
    digests: BlockDigests


@contextmanager
def node(
    connector: str, name: str, shape: Shape, make_memory: Callable[[Shape, int], KVMemory]
) -> Iterator[Node]:
    """Start all ranks of one node; each rank but the leader runs on its own thread.

    Args:
        make_memory: makes the memory of a rank.
    """
    num_ranks = shape[0] * shape[1]
    memories = [make_memory(shape, rank) for rank in range(num_ranks)]
    leader = memories[0].manifest.leader
    links: dict[int, Connection] = {}
    threads = []
    for rank in range(num_ranks):
        if rank != leader:
            links[rank], theirs = Pipe()
            thread = threading.Thread(
                target=serve, args=(theirs, memories[rank], Open(connector, name))
            )
            thread.start()
            threads.append(thread)
    local = open_transport(Open(connector, name), memories[leader])
    ranks = RanksTransport(local, links) if links else None
    try:
        yield Node(memories, ranks or local, ranks, BlockDigests(memories[leader], ranks))
    finally:
        for link in links.values():
            link.close()
        for thread in threads:
            thread.join()


def serve(link: Connection, memory: KVMemory, start: Open) -> None:
    transport = open_transport(start, memory)
    try:
        RankService(link, memory, transport).run()
    except (EOFError, BrokenPipeError, ConnectionResetError, OSError):
        pass
    finally:
        transport.close()
        link.close()


@contextmanager
def linked(
    connector: str, layers: list[LayerKV], shapes: tuple[Shape, Shape], digests: bool
) -> Iterator[tuple[Link, Node, Node]]:
    number = next(numbers)
    deaths: list[Exception] = []
    with ExitStack() as stack:
        p, d = (
            stack.enter_context(
                node(connector, f"{role}{number}-ranks", shape, partial(memory_of, layers))
            )
            for role, shape in zip("pd", shapes, strict=True)
        )
        sender = Sender(
            p.transport, lambda: None, deaths.append, digests=p.digests if digests else None
        )
        receiver = Receiver(
            d.transport, lambda: None, deaths.append, digests=d.digests if digests else None
        )
        for end in (sender, receiver):
            end.loop.start()
        receiver.connect(sender.peer_info)
        sender.connect(receiver.peer_info)
        link = Link(sender, receiver, p.memories[0].tensor, d.memories[0].tensor)
        for side in "pd":
            link.wait(side, Kind.PEER_CONNECTED)
        try:
            yield link, p, d
        finally:
            sender.close()
            receiver.close()
        assert deaths == []


def hand_over(
    connector: str, layers: list[LayerKV], shapes: tuple[Shape, Shape], *, digests: bool = False
) -> None:
    """Hand over a prompt of several blocks; push the last block layer by layer if it can be cut."""
    with linked(connector, layers, shapes, digests) as (link, p, d):
        groups = len(p.memories[0].spec.groups)
        sources, targets = [4, 1, 7, 2], [9, 3, 0, 5]
        own = [0, 1, 0, 1] if groups == 2 else []  # blocks of both kinds in turn
        marks = {block_id: block_id for block_id in range(NUM_BLOCKS)}
        fill(layers, shapes[0], p.memories, marks, dict(zip(sources, own, strict=False)))
        link.sender.start("a", 0, link.d, num_tokens=8, num_blocks=4, groups=own)
        link.wait("d", Kind.STARTED)
        link.receiver.grant(
            KVReservation(
                request_id="a",
                epoch=0,
                engine_id=link.p,
                block_ids=tuple(targets),
                groups=tuple(own),
            )
        )
        num_layers = p.memories[0].manifest.layers_per_unit
        link.push("a", 0, tuple(sources[:2]), 4)
        if num_layers > 1 and groups == 1:
            for part in ((0, 1), (1, num_layers)):
                link.push("a", 2, tuple(sources[2:]), 0, layers=part)
            link.push("a", 4, (), 8, token_id=5)
        else:
            link.push("a", 2, tuple(sources[2:]), 8, token_id=5)
        committed = link.wait("d", Kind.COMMITTED)
        assert committed.receipt is not None
        assert committed.receipt.num_blocks == 4
        check(layers, shapes[1], d, dict(zip(targets, sources, strict=True)), own)


def check(
    layers: list[LayerKV], shape: Shape, d: Node, moves: dict[int, int], groups: list[int]
) -> None:
    """Each rank of the receiver has what a prefill of its shape would have written."""
    wanted = [memory_of(layers, shape, rank) for rank in range(len(d.memories))]
    group_of = dict(zip(moves, groups, strict=True)) if groups else {}
    fill(layers, shape, wanted, moves, group_of)
    for own, expected in zip(d.memories, wanted, strict=True):
        for mine, theirs in zip(arrays_of(own), arrays_of(expected), strict=True):
            for block_id in moves:
                if group_of.get(block_id, 0) == mine[1]:
                    assert torch.equal(mine[4][block_id], theirs[4][block_id])
        for block_id in set(range(NUM_BLOCKS)) - set(moves):
            assert not own.tensor[block_id].any(), f"block {block_id} was written"


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    make=st.sampled_from([paged, by_heads, windowed, latent, states]),
    heads=HEADS,
    shapes=st.tuples(SHAPES, SHAPES),
    digests=st.booleans(),
)
def test_any_two_shapes_hand_any_kind_over(
    make: type, heads: int, shapes: tuple[Shape, Shape], digests: bool
) -> None:
    hand_over("in_memory", make(heads), shapes, digests=digests)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    "shapes",
    [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (2, 1)), ((4, 1), (2, 1)), ((2, 2), (1, 2))],
    ids=str,
)
def test_shapes_that_people_run_hand_heads_over(
    connector: str, shapes: tuple[Shape, Shape]
) -> None:
    for make, digests in itertools.product((paged, by_heads, states), (False, True)):
        hand_over(connector, make(4), shapes, digests=digests)
