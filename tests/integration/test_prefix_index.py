"""Tests that the router's prefix index agrees with the prefix caches of real nodes.

The router's end of the links runs in the test, so that its index can be looked at; the nodes are
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_identity import folder_identity
from baton.link.words import (
    PAIR_ROLES,
    DecodeCommand,
    KVCacheEvents,
    NodeBeat,
    NodeRole,
    PrefillCommand,
    SendKVSnapshot,
)
from baton.serving.rpc import RpcServer
from baton.v1 import node_pb2, node_pb2_grpc
from router.api.grpc.link_service import NodeLinkService
from router.fleet.node import LegDelta, LegWork, Node
from router.fleet.node_pool import NodePool
from router.fleet.prefix.prompt_hashes import PromptHashes
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]

NUM_BLOCKS = 64
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
NODE_ARGS = ["--dtype", "float32", "--num-threads", "1", "--num-blocks", str(NUM_BLOCKS)]


async def until(condition: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what}: not within {READY_TIMEOUT_S:g} s"
        await asyncio.sleep(0.005)


def _has_new_beat(node: Node, before: NodeBeat) -> bool:
    return node.beat is not before


class Inbox(asyncio.Queue[LegDelta]):
    """Queue of a request's deltas from nodes, without those that carry only a token."""

    def on_leg_delta(self, item: LegDelta) -> None:
        self.put_nowait(item)

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None: ...


class Site:
    """A pool of one prefill and one decode node, and requests placed by hand."""

    def __init__(self, pool: NodePool) -> None:
        self.pool = pool
        self._numbers = itertools.count(1)

    def node(self, role: NodeRole) -> Node:
        return next(node for node in self.pool.nodes if node.registration.role is role)

    @property
    def is_ready(self) -> bool:
        nodes = self.pool.nodes
        return len(nodes) == 2 and all(
            any(report.connected for report in node.reports.values()) for node in nodes
        )

    def predicted(self, role: NodeRole, prompt: Sequence[int]) -> int:
        """Tokens that the index says a node has."""
        found = self.pool.prefix_index.match_tokens(PromptHashes(prompt))
        return found.get(self.node(role).engine_id, 0)

    def held(self, role: NodeRole) -> set[int]:
        return set(self.pool.prefix_index._holders[self.node(role).engine_id].blocks)

    async def settle(self) -> None:
        """Wait until all that was stored so far is known: beats come behind events."""
        for _ in range(2):
            beats = {node.engine_id: node.beat for node in self.pool.nodes}
            for node in self.pool.nodes:
                before = beats[node.engine_id]
                await until(functools.partial(_has_new_beat, node, before), "a beat")

    async def run(self, prompt: Sequence[int]) -> tuple[int, int]:
        """One request; the tokens of its prompt that the prefill and the decode node had."""
        prefill, decode = self.node(NodeRole.PREFILL), self.node(NodeRole.DECODE)
        number, inbox = next(self._numbers), Inbox()
        request_id = f"r{number}"
        for node in (prefill, decode):
            node.open_leg(request_id, number, inbox, LegWork(num_tokens=0))
        shared = {
            "request_id": request_id,
            "epoch": number,
            "prompt_token_ids": list(prompt),
            "sampling_params": PARAMS,
            "timeout_s": 60.0,
        }
        decode.send(DecodeCommand(prefill_engine_id=prefill.engine_id, **shared))  # type: ignore[arg-type]
        prefill.send(PrefillCommand(decode_engine_id=decode.engine_id, **shared))  # type: ignore[arg-type]
        cached: dict[NodeRole, int] = {}
        while len(cached) < 2:
            item = await asyncio.wait_for(inbox.get(), 60)
            assert item.delta.error is None, item.delta.error
            receipt = item.delta.prefill or item.delta.decode
            if receipt is not None:
                cached[item.role] = receipt.num_cached_tokens
        for node in (prefill, decode):
            node.close_leg(number)
        return cached[NodeRole.PREFILL], cached[NodeRole.DECODE]


def start_process(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


@contextlib.asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[tuple[Site, list[subprocess.Popen[bytes]]]]:
    pool = NodePool(own_identity=folder_identity(DEMO_MODEL), max_model_len=2048)

    def register(server: object) -> None:
        node_pb2_grpc.add_NodeLinkServicer_to_server(NodeLinkService(pool), server)  # type: ignore[no-untyped-call]  # generated

    server = RpcServer([node_pb2.DESCRIPTOR.services_by_name["NodeLink"]], register)
    address = await server.start("127.0.0.1:0")
    processes = []
    try:
        # No short-cut: what the decode node lacks must travel.
        for role, more in (("prefill", []), ("decode", ["--local-prefill-threshold", "0"])):
            command = [sys.executable, "-m", "baton", role, "--model", str(DEMO_MODEL)]
            command += ["--router", address, "--name", role, *NODE_ARGS, *more]
            processes.append(start_process(command, folder / role))
        yield Site(pool), processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await server.stop(0.5)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [5 + (seed * 977 + index * 31) % 4000 for index in range(num_tokens)]


async def check_predictions(site: Site) -> None:
    """Prompts that are there whole, in part, and no longer."""
    first = prompt(1, 200)
    assert await site.run(first) == (0, 0)
    await site.settle()
    for asked, num_shared in ((first, 192), (first[:96] + prompt(2, 60), 96)):
        expected = tuple(site.predicted(role, asked) for role in PAIR_ROLES)
        assert expected == (num_shared, num_shared)
        assert await site.run(asked) == expected
        await site.settle()
    # Others need the blocks: what is left of the first prompt is seen from here.
    for seed in range(10, 20):
        if site.predicted(NodeRole.PREFILL, first) < 192:
            break
        await site.run(prompt(seed, 300))
        await site.settle()
    expected = tuple(site.predicted(role, first) for role in PAIR_ROLES)
    assert expected[0] < 192
    assert await site.run(first) == expected
    await site.settle()


async def check_snapshots(site: Site) -> None:
    """Check that the index built from events equals the present contents of the nodes' pools."""
    held = {role: site.held(role) for role in PAIR_ROLES}
    assert all(0 < len(blocks) <= NUM_BLOCKS for blocks in held.values())
    for node in site.pool.nodes:
        node.send(SendKVSnapshot())
    await site.settle()
    assert {role: site.held(role) for role in PAIR_ROLES} == held

    prefill, index = site.node(NodeRole.PREFILL), site.pool.prefix_index
    site.pool.on_event(prefill, KVCacheEvents(10**9, False))
    assert not index.is_exact(prefill.engine_id)
    await until(lambda: index.is_exact(prefill.engine_id), "a snapshot after a gap")
    await site.settle()
    assert site.held(NodeRole.PREFILL) == held[NodeRole.PREFILL]


async def check_all(folder: Path) -> None:
    async with running_site(folder) as (site, processes):
        await until(lambda: site.is_ready, "both nodes joined and connected")
        index = site.pool.prefix_index
        ids = [node.engine_id for node in site.pool.nodes]
        await until(lambda: all(map(index.is_exact, ids)), "snapshots")
        await check_predictions(site)
        await check_snapshots(site)
        lost = site.node(NodeRole.PREFILL).engine_id
        processes[0].kill()
        await until(lambda: len(site.pool.nodes) == 1, "the loss of the prefill node")
        assert lost not in index.match_tokens(PromptHashes(prompt(1, 200)))


def test_the_index_says_what_nodes_find(tmp_path: Path) -> None:
    asyncio.run(check_all(tmp_path))
