"""Measure the simulator's CPU time per token and per idle node, without a router.

Simulated nodes join a sink: a minimal router that sends each pair of nodes its requests, and drops
the answers unread. Only the CPU time of the simulator's process counts, so a busy machine changes
the figures little.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.synchronize import Event
from typing import Any

import uvloop

from baton.api.sampling_params import SamplingParams
from baton.link import wire
from baton.link.words import (
    BEAT_INTERVAL_S,
    DecodeCommand,
    PrefillCommand,
    RouterBeat,
    RouterCommand,
)
from baton.processes.free_address import free_address
from baton.serving.rpc import RpcServer
from baton.v1 import node_pb2, node_pb2_grpc
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Document, Run
from sim_node.cluster import SimCluster
from sim_node.options import SimOptions
from sim_node.timing import preset

PROMPT = list(range(200))
ENDLESS = SamplingParams(max_tokens=10**6)
SETTLE_S = 6.0
# Number of pairs of nodes, number of streams of all pairs, time scale.
ROWS = ((1, 256, 1.0), (16, 1024, 1.0), (256, 4096, 10.0))


class Sink(node_pb2_grpc.NodeLinkServicer):
    """A minimal router, which starts requests and only receives their tokens."""

    def __init__(self, num_streams: int, begin: Event) -> None:
        self._num_streams = num_streams
        self._begin = begin
        self._queues: dict[str, asyncio.Queue[RouterCommand]] = {}  # by engine id

    async def Link(  # gRPC's naming
        self, request_iterator: AsyncIterator[node_pb2.NodeMessage], context: object
    ) -> AsyncIterator[node_pb2.RouterMessage]:
        first = await anext(request_iterator)
        queue = self._queues[first.register.engine_id] = asyncio.Queue()

        async def read() -> None:
            async for _ in request_iterator:
                pass

        reader = asyncio.create_task(read())
        yield node_pb2.RouterMessage(registered=node_pb2.Registered())
        while not reader.done():
            yield wire.command_to_proto(await queue.get())

    async def beat(self) -> None:
        """Send heartbeats to nodes, and start the streams when ``begin`` is set."""
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            for queue in self._queues.values():
                queue.put_nowait(RouterBeat())
            if self._begin.is_set():
                self._begin.clear()
                self._hand_out()

    def _hand_out(self) -> None:
        prefills = sorted(name for name in self._queues if name.startswith("sim-p"))
        decodes = sorted(name for name in self._queues if name.startswith("sim-d"))
        pairs = itertools.cycle(zip(prefills, decodes, strict=True))
        for number, (prefill, decode) in zip(range(self._num_streams), pairs, strict=False):
            common: dict[str, Any] = {
                "request_id": f"{number:032x}",
                "epoch": 1,
                "prompt_token_ids": [number % 1000, *PROMPT],
                "sampling_params": ENDLESS,
                "timeout_s": 1e6,
            }
            decode_command = DecodeCommand(**common, prefill_engine_id=prefill)
            self._queues[decode].put_nowait(decode_command)
            self._queues[prefill].put_nowait(PrefillCommand(**common, decode_engine_id=decode))


def run_sink(address: str, num_streams: int, begin: Event) -> None:
    """Run the sink in this process, which ends with its parent."""

    async def serve() -> None:
        sink = Sink(num_streams, begin)
        server = RpcServer(
            [],
            lambda grpc_server: node_pb2_grpc.add_NodeLinkServicer_to_server(  # type: ignore[no-untyped-call]  # generated
                sink, grpc_server
            ),
        )
        await server.start(address)
        await sink.beat()

    uvloop.run(serve())


async def measure(
    num_pairs: int, num_streams: int, time_scale: float, seconds: float
) -> dict[str, float]:
    """Measure one row: ``num_pairs`` pairs of simulated nodes with ``num_streams`` streams."""
    address = free_address()
    context = multiprocessing.get_context("spawn")
    begin = context.Event()
    sink = context.Process(target=run_sink, args=(address, num_streams, begin), daemon=True)
    sink.start()
    options = SimOptions(timing=preset("h100-8b").scaled(time_scale), max_model_len=8192)
    cluster = SimCluster(
        address, str(DEMO_MODEL), num_prefill=num_pairs, num_decode=num_pairs, options=options
    )
    try:
        async with cluster:
            await asyncio.sleep(SETTLE_S)
            idle = await _over(cluster, seconds)
            begin.set()
            await asyncio.sleep(SETTLE_S)
            busy = await _over(cluster, seconds)
            num_running = cluster.stats().num_running
    finally:
        sink.terminate()
        sink.join()
    num_tokens, cpu_s, elapsed_s = busy
    for_tokens_s = cpu_s - idle[1] / idle[2] * elapsed_s
    return {
        "num_nodes": 2 * num_pairs,
        "num_streams": num_streams,
        # Fewer streams than asked for: the sink or simulator stalled so long that a link counted as
        # dead.
        "num_streams_at_end": num_running,
        "time_scale": time_scale,
        "idle_cpu_share": round(idle[1] / idle[2], 3),
        "tokens_per_s": round(num_tokens / elapsed_s),
        "cpu_share": round(cpu_s / elapsed_s, 3),
        "cpu_us_per_token": round(for_tokens_s / num_tokens * 1e6, 1),
        "max_lag_ms": round(cluster.stats().max_lag_s * 1e3, 1),
    }


async def _over(cluster: SimCluster, seconds: float) -> tuple[int, float, float]:
    """Return the number of tokens, the CPU seconds and the wall seconds of an interval."""
    before, cpu_s, began = cluster.stats().num_tokens, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    stats = cluster.stats()
    return stats.num_tokens - before, time.process_time() - cpu_s, time.perf_counter() - began


def run(run: Run, seconds: float = 10.0, rows: Sequence[int] = tuple(range(len(ROWS)))) -> Document:
    """Measure the rows one after another.

    Args:
        seconds: length of each measurement in seconds.
        rows: indexes of the rows to measure.
    """
    found = []
    for num_pairs, num_streams, time_scale in (ROWS[index] for index in rows):
        found.append(uvloop.run(measure(num_pairs, num_streams, time_scale, seconds)))
    run.show("simulator", found)
    return {"rows": found}
