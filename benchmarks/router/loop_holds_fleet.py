"""Rows of `loop_holds.py` for routers and nodes with thousands of requests, and large messages.

Each row is one call on an event loop, or all that one event sets off there: the longest round of
the loop is what holds up its sockets and timers. Times are of the processor, so other load on the
machine hardly counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from baton.api.outputs import RequestDelta, TokenLogprobs
from baton.api.sampling_params import MAX_LOGPROBS, SamplingParams
from baton.kv.block_hash import shorten
from baton.link.node_end import NodeEnd
from baton.link.words import KVCacheEvents, NodeRole, RequestView, StepDeltas
from baton.text.stop_strings import StopStrings
from baton.v1 import admin_pb2
from benchmarks.engine.scheduler_subjects import (
    NUM_PARKED,
    NUM_RUNNING,
    BatonSubject,
    Load,
    Prompts,
)
from decode_node.node import DecodeNode
from engine.core.block_pool import BlockPool
from router.api.admin.request_stats import window_stats
from router.api.admin.views import describe_nodes, describe_request, describe_stats
from router.calls.dispatcher import Dispatcher
from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind
from router.intake.metrics import RouterMetrics
from router.policies.cost import Cost
from tests.fakes.router.nodes import HandNode, make_pool, make_registration
from tests.fakes.router.router_scene import Scene

NUM_REQUESTS, NUM_BLOCKS = 4096, 2**20
SETTLE_S = 2.0
Note = Callable[[str, str, float], None]


@dataclass(slots=True)
class Rounds:
    """Watch the rounds of an event loop, and the garbage collector in them.

    Attributes:
        longest_s: processor time of the longest round.
        collecting_s: processor time of the longest garbage collection.
    """

    longest_s: float = 0.0
    collecting_s: float = 0.0
    _began_at: float = 0.0
    _collects_since: float = 0.0

    async def watch(self) -> None:
        while True:
            self._began_at = time.thread_time()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - self._began_at)

    def note_collection(self, phase: str, _: object) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collects_since = now
        else:
            self.collecting_s = max(self.collecting_s, now - self._collects_since)

    def start_over(self) -> None:
        self.longest_s = self.collecting_s = 0.0
        self._began_at = time.thread_time()


class BusyRouter:
    """A router with nodes driven by hand, and with the most open requests it allows."""

    def __init__(self, num_nodes: int, note: Note) -> None:
        self.pool = pool = make_pool(8192)
        half = num_nodes // 2
        self.prefills = [HandNode(pool, _roomy(f"p{i}", NodeRole.PREFILL)) for i in range(half)]
        self.decodes = [HandNode(pool, _roomy(f"d{i}", NodeRole.DECODE)) for i in range(half)]
        for prefill in self.prefills:
            for decode in self.decodes:
                prefill.reach(decode)
        self.dispatcher = Dispatcher(pool, Cost())
        self.rounds = Rounds()
        self.tasks: list[asyncio.Task[None]] = []
        self._note, self._name = note, f"{num_nodes} nodes"

    async def begin(self) -> None:
        """Begin all requests, as fast as `CallPace` lets a flood begin."""
        for _ in range(NUM_REQUESTS // 64):
            first = len(self.tasks)
            self.tasks += [asyncio.create_task(self._run(first + i)) for i in range(64)]
            await asyncio.sleep(0.02)

    async def _run(self, number: int) -> None:
        call = Scene.make(f"r{number}", SamplingParams(max_tokens=256, seed=1), timeout_s=600)
        call = dataclasses.replace(call, prompt_token_ids=list(range(512)))
        async with contextlib.aclosing(self.dispatcher.run(call)) as outputs:
            async for _ in outputs:
                pass

    async def measure(self, what: str, make: Callable[[], Any]) -> None:
        """Record the longest round of the loop that a call causes."""
        await asyncio.sleep(0.05)
        self.rounds.start_over()
        made = make()
        if asyncio.iscoroutine(made):
            await made
        await asyncio.sleep(SETTLE_S)
        longest_s, collecting_s = self.rounds.longest_s, self.rounds.collecting_s
        self._note(f"{what} ({self._name})", "router's loop", longest_s)
        if collecting_s > 0.02:
            self._note(f"{what}: garbage collection in it", "router's loop", collecting_s)

    def say_token(self, index: int) -> None:
        """Have one decode node send a token of each of its requests, in one message."""
        node = self.decodes[0].node
        epochs = tuple(node.legs)
        self.pool.on_event(node, StepDeltas(epochs, (index,) * len(epochs), (5,) * len(epochs)))


def _roomy(name: str, role: NodeRole) -> Any:
    registration = make_registration(name, role, max_model_len=8192)
    return dataclasses.replace(registration, num_blocks=10**6, prefix_hash="sha256")


async def of_router(num_nodes: int, note: Note) -> None:
    """Measure single rounds of a router's loop with this many nodes."""
    router = BusyRouter(num_nodes, note)
    gc.collect()
    gc.freeze()  # as the router does when it has started
    gc.callbacks.append(router.rounds.note_collection)
    watching = asyncio.create_task(router.rounds.watch())
    dispatcher, pool = router.dispatcher, router.pool
    metrics = RouterMetrics(pool, dispatcher.admission, None, dispatcher.recoveries.suspects)

    def list_requests() -> None:
        records = map(describe_request, dispatcher.log.open)
        admin_pb2.ListRouterRequestsResponse(requests=records).SerializeToString()

    async def list_nodes() -> None:
        described = await describe_nodes(pool, pool.nodes)
        admin_pb2.ListNodesResponse(nodes=described).SerializeToString()

    def stats() -> None:
        window = window_stats([dispatcher.log], 300.0)
        describe_stats([dispatcher.log], window, [dispatcher.admission.state()]).SerializeToString()

    await router.measure("4,096 requests begin, 64 in 20 ms", router.begin)
    await router.measure("metrics page", metrics.text)
    await router.measure("ListRequests of 4,096", list_requests)
    await router.measure("ListNodes", list_nodes)
    await router.measure("GetStats", stats)
    router.decodes.sort(key=lambda one: -one.node.num_open)
    num_open = router.decodes[0].node.num_open
    await router.measure(f"a step with {num_open} first tokens", lambda: router.say_token(0))
    await router.measure(f"a step with {num_open} tokens", lambda: router.say_token(1))
    logging.disable(logging.CRITICAL)
    await router.measure(
        f"a decode node with {num_open} requests dies, all are retried", router.decodes[0].leave
    )
    logging.disable(logging.NOTSET)
    cancel_all = [task.cancel for task in router.tasks]
    await router.measure(
        f"{dispatcher.num_open} requests are cancelled", lambda: [one() for one in cancel_all]
    )
    watching.cancel()
    await asyncio.gather(*router.tasks, return_exceptions=True)
    gc.callbacks.remove(router.rounds.note_collection)
    gc.unfreeze()


def of_messages(note: Note) -> None:
    """Measure what a node's loop does with large events, and the router's with a snapshot."""

    def measure(what: str, where: str, make: Callable[[], Any]) -> Any:
        began_at = time.thread_time()
        made = make()
        note(what, where, time.thread_time() - began_at)
        return made

    end = NodeEnd(make_registration("n", NodeRole.DECODE))
    one = TokenLogprobs(-1.0, tuple((token_id, -1.0) for token_id in range(MAX_LOGPROBS)))

    def deltas(num_requests: int, num_prompt_tokens: int = 0) -> tuple[RequestDelta, ...]:
        prompt = (None, *(one,) * (num_prompt_tokens - 1)) if num_prompt_tokens else ()
        return tuple(
            RequestDelta(f"r{i}", 0, (1,), epoch=i, logprobs=(one,), prompt_logprobs=prompt)
            for i in range(num_requests)
        )

    where = "node's loop"
    step = deltas(256)
    measure("a step of 256 requests with 20 logprobs each", where, lambda: end.say(step, 0.0))
    prompt = deltas(1, 250_000 // (MAX_LOGPROBS + 1))
    measure("prompt logprobs of one request, the most", where, lambda: end.say(prompt, 0.0))
    hashes = [number.to_bytes(32, "little") for number in range(NUM_BLOCKS)]
    short = measure(
        "names of 2^20 blocks for a snapshot", "engine's thread", lambda: shorten(hashes)
    )
    events = KVCacheEvents(1, True, tuple(short[: 2**16]), ())
    measure("one message of a snapshot: 65,536 blocks", where, lambda: end.say(events, 0.0))
    index = PrefixIndex()
    index.add_node("n", HashKind(16, "sha256", b""))
    measure(
        "the same in the router's index", "router's loop", lambda: index.apply_events("n", events)
    )
    view = RequestView(
        request_id="r", status="running", transfer_state="", num_tokens=9, num_computed_tokens=9,
        num_blocks=1, age_s=1.0,
    )  # fmt: skip
    views = [view] * NUM_REQUESTS
    measure("a list of 4,096 requests of a node", where, lambda: _list(views))
    text = "a" * 2**20
    stop = StopStrings(["a" * 64 + "b", "b"])
    measure(
        "stop strings in 1 MiB of text, pushed at once", "router's loop", lambda: stop.push(text)
    )


def of_node(note: Note) -> None:
    """Measure a scheduler's steps and a decode node's beat with 4,096 requests."""
    load = Load("4,096 requests", NUM_REQUESTS - NUM_RUNNING, NUM_PARKED)
    scheduler = BatonSubject(load, Prompts.draw(), prefix_cache=True)
    steps_s = []
    for _ in range(32):
        began_at = time.thread_time()
        scheduler.step()
        steps_s.append(time.thread_time() - began_at)
    note(f"a step of a scheduler with {NUM_REQUESTS:,} requests", "engine's thread", max(steps_s))
    requests = scheduler.scheduler.requests
    assert len(requests) == NUM_REQUESTS
    engine = SimpleNamespace(requests=requests, block_pool=BlockPool(8))
    reservations = SimpleNamespace(quarantine=SimpleNamespace(num_blocks=0), num_transfers=0)
    node: Any = SimpleNamespace(engine=engine, reservations=reservations)  # read by a beat
    began_at = time.thread_time()
    DecodeNode.beat(node)
    beat_s = time.thread_time() - began_at
    note(f"a beat of a node with {NUM_REQUESTS:,} requests", "node's loop", beat_s)


def _list(views: list[RequestView]) -> None:
    from baton.link import wire

    requests = [wire.request_view_to_proto(view) for view in views]
    admin_pb2.ListRequestsResponse(requests=requests).SerializeToString()


def measure_fleet(note: Note) -> None:
    """Measure all rows of this module."""
    of_messages(note)
    of_node(note)
    for num_nodes in (4, 64):
        asyncio.run(of_router(num_nodes, note))
