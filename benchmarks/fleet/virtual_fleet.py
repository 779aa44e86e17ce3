"""Runs a router and simulated nodes in one process, in virtual time.

The virtual clock jumps from event to event. The code of the router's dispatcher, node pool, prefix
index and policy and of the simulator's nodes is the real code. In place of gRPC, messages arrive
`MESSAGE_S` later, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_identity import folder_identity
from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.words import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    RequestDelta,
    RouterBeat,
    RouterCommand,
    StepDeltas,
)
from benchmarks.runner.answers import Answer, Case, follow
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.calls.wake_ups import WakeUps
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission
from router.policies import POLICIES
from sim_node.cluster import SimCluster
from sim_node.options import SimOptions
from sim_node.virtual_time import VirtualTimeLoop

MESSAGE_S = 0.0005
REDIAL_S = 0.5  # pause before a node joins again, as in `RouterLink`
MODEL = {"vocab_size": 1024, "max_position_embeddings": 131_072}
TIMEOUT_S = 1e6


T = TypeVar("T")


def on_virtual_time(playing: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, on a clock that jumps from event to event."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(playing)
    finally:
        loop.close()


class VirtualRouter:
    """A dispatcher over a pool of nodes, which answers calls in this process.

    Args:
        cpu_clock: returns the seconds of CPU time that the dispatcher has used; None: the virtual
            clock.
    """

    def __init__(
        self,
        pool: NodePool,
        policy: str = "cost",
        admission: Admission | None = None,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.dispatcher = Dispatcher(pool, POLICIES.load(policy)(), admission=admission)
        # Clients wake up at once for first tokens, last tokens and failures, and every 50 ms for
        # others.
        self.dispatcher.wake_ups = WakeUps(clock=clock, cpu_clock=cpu_clock or clock)
        self._numbers = itertools.count()

    def call(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        timeout_s: float = TIMEOUT_S,
        **terms: Any,
    ) -> Call:
        """Make a `Call` with this prompt.

        Args:
            request_id: id of the request; empty: make a new id.
            terms: fields of the call's `Terms`, by name.
        """
        return Call(
            request_id=request_id or f"r{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling_params=params,
            terms=Terms(received_at=0.0, **terms),
            timeout_s=timeout_s,
        )

    async def ask(self, case: Case, **options: Any) -> Answer:
        """Send a request with a known answer, follow it to its end; ``options``: as for `call`."""
        return await follow(
            self.dispatcher.run(self.call(case.prompt, case.params, **options)), case
        )


# ---------------------------------------------------------------- links


class PoolLinks:
    """Links a simulated node to a node pool in the same process, in place of `RouterLinks`.

    Args:
        is_dropped: returns whether an event is lost on its way to the router.
    """

    def __init__(
        self,
        pool: NodePool,
        registration: NodeRegistration,
        submit: Callable[..., None],
        on_joined: Callable[[bool], Awaitable[None]],
        is_dropped: Callable[[str, NodeEvent], bool] = lambda name, event: False,
    ) -> None:
        self._pool = pool
        self._registration = registration
        self._submit = submit
        self._is_dropped = is_dropped
        self._loop = asyncio.get_running_loop()
        self._on_joined = on_joined
        self._broken = asyncio.Event()
        self._away_s = REDIAL_S
        self._node = self._make_node()
        self._emit = self._make_lane(self._take)

    async def run(self) -> None:
        while True:
            self._broken.clear()
            self._pool.add_node(self._node)
            await self._on_joined(True)
            try:
                await self._broken.wait()
            finally:
                self._pool.remove(self._node)
            self._submit(AbortAll("the link broke", self._pool.router_id))
            await self._on_joined(False)
            await asyncio.sleep(self._away_s)
            self._away_s, self._node = REDIAL_S, self._make_node()

    def break_for(self, away_s: float) -> None:
        """Break the link now; the node, whose process lives on, joins again after ``away_s``."""
        self._away_s = away_s
        self._broken.set()

    def emit(self, event: NodeEvent) -> None:
        if not (self._broken.is_set() or self._is_dropped(self._node.name, event)):
            self._emit(event)

    def beat(self, beat: NodeBeat, num_intervals: int) -> int:
        self.emit(beat)
        return INTERVALS_AT_REST if beat.rests else 1

    def _make_node(self) -> Node:
        lane = self._make_lane(self._submit)

        def send(command: RouterCommand) -> None:
            # The node's real link, which is absent here, handles heartbeats
            if not isinstance(command, RouterBeat):
                lane(command)

        return Node(self._registration, send, hang_up=self._broken.set)

    def _take(self, event: NodeEvent) -> None:
        self._pool.on_event(self._node, _as_rows(event) if isinstance(event, tuple) else event)

    def _make_lane(self, take: Callable[..., None]) -> Callable[..., None]:
        """Return a function that passes messages to ``take``, in order and `MESSAGE_S` later."""
        lane: deque[Any] = deque()

        def put(item: Any) -> None:
            lane.append(item)
            self._loop.call_later(MESSAGE_S, lambda: take(lane.popleft()))

        return put


def _as_rows(deltas: tuple[RequestDelta, ...]) -> StepDeltas:
    """Split the deltas of a simulated node's step as `wire.split_step` does, but faster."""
    epochs, output_indexes, token_ids, others = [], [], [], []
    for delta in deltas:
        if delta.prefill or delta.decode or delta.error or delta.finish_reason:
            others.append(delta)
        else:
            epochs.append(delta.epoch)
            output_indexes.append(delta.output_index)
            token_ids.append(delta.token_ids[0])
    return StepDeltas(epochs, output_indexes, token_ids, tuple(others))


@contextlib.asynccontextmanager
async def joined_fleet(
    num_prefill: int, num_decode: int, options: SimOptions, *, local_prefill: bool
) -> AsyncIterator[NodePool]:
    """Run simulated nodes; yield the pool that they have joined (`joined_cluster`)."""
    cluster = joined_cluster(num_prefill, num_decode, options, local_prefill=local_prefill)
    async with cluster as joined:
        yield joined.pool


@dataclass(frozen=True, slots=True)
class JoinedCluster:
    """Simulated nodes, the pool that they have joined, and their links by node name."""

    pool: NodePool
    cluster: SimCluster
    links: Mapping[str, PoolLinks]


@contextlib.asynccontextmanager
async def joined_cluster(
    num_prefill: int,
    num_decode: int,
    options: SimOptions,
    *,
    local_prefill: bool,
    is_dropped: Callable[[str, NodeEvent], bool] = lambda name, event: False,
) -> AsyncIterator[JoinedCluster]:
    """Run simulated nodes; yield them with the pool that they have joined.

    The event loop must be a `VirtualTimeLoop`.

    Args:
        local_prefill: whether decode nodes may compute prompts themselves.
        is_dropped: returns whether this event of the node with this name is lost.
    """
    links: dict[str, PoolLinks] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), "utf-8")  # noqa: ASYNC240
        pool = NodePool(
            own_identity=folder_identity(Path(folder)),
            max_model_len=MODEL["max_position_embeddings"],
            may_self_prefill=local_prefill,
            clock=asyncio.get_running_loop().time,
        )

        def make_links(
            routers: object,
            registration: NodeRegistration,
            submit: Callable[..., None],
            drain: object,
            *,
            on_joined: Callable[[bool], Awaitable[None]],
            on_stop: object,
            join_timeout_s: float,
            node_token: object,
            tls: object,
        ) -> PoolLinks:
            link = PoolLinks(pool, registration, submit, on_joined, is_dropped)
            links[registration.node_name] = link
            return link

        cluster = SimCluster(
            "",
            folder,
            num_prefill=num_prefill,
            num_decode=num_decode,
            options=options,
            make_links=make_links,
        )
        async with cluster:
            await asyncio.sleep(1.0)  # virtual seconds in which all pairs of nodes connect
            yield JoinedCluster(pool, cluster, links)
