"""NodeThreads: runs a node on its engine's thread; used from a program's asyncio thread.

Prefill nodes and decode nodes use this class; they differ in the loop (`node.py`) and the end of
the KV connector that `make_node` makes.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from baton.link.words import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    RequestView,
    RouterCommand,
    SendKVSnapshot,
)
from baton.telemetry.ledger import Ledger
from baton.telemetry.round_watch import Rounds
from engine.core.metrics import EngineMetrics
from engine.core.request import RequestStatus
from engine.crash_dump import dump_crash
from engine.engine_loop import TICK_S, EngineLoop
from kvconnector.base import ConnectorMetrics, HandoffMetrics
from node_runtime.adapters.node_adapters import NodeAdapters
from node_runtime.node_engine import FirstSteps, LoadedEngine, compute_first_steps
from node_runtime.reports.collector import NodeCollector
from node_runtime.reports.kv_event_feed import KVEventFeed
from node_runtime.weights.node_weights import NodeWeights

logger = logging.getLogger(__name__)

REST_TICK_S = 1.0  # an engine without requests and transfers steps at this interval
ENGINE_THREAD, KV_THREAD = "engine", "kv-io"
ENCODINGS_THREAD = "encodings-io"
FETCHES_THREAD, SHARES_THREAD = "fetches-io", "shares-io"


class Node(Protocol):
    """The loop of a node; see `prefill_node/node.py` and `decode_node/node.py`."""

    def submit(self, command: RouterCommand | AbortAll) -> None: ...

    def step(self) -> bool: ...

    def beat(self) -> NodeBeat: ...

    def requests(self) -> list[RequestView]: ...

    def ledger(self) -> Ledger: ...

    def handoff_metrics(self) -> HandoffMetrics: ...


class ConnectorEnd(Protocol):
    """A node's end of the KV connector (sender or receiver), as `NodeThreads` uses it."""

    def describe(self) -> bytes:
        """Return the peer info for nodes of the other role."""

    def metrics(self) -> ConnectorMetrics: ...

    @property
    def rounds(self) -> Rounds: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectorEnds:
    """A node's ends of the KV connector.

    Attributes:
        kv: the end for hand-offs.
        encodings: the end that receives encodings of images; None: the node receives none.
        fetches: the end that receives cached prefixes; None: the node receives none.
        shares: the end that sends cached prefixes; None: the node sends none.
    """

    kv: ConnectorEnd
    encodings: ConnectorEnd | None = None
    fetches: ConnectorEnd | None = None
    shares: ConnectorEnd | None = None

    def others(self) -> dict[str, ConnectorEnd]:
        """Return the ends besides that for hand-offs, by the names of their threads."""
        ends = {
            ENCODINGS_THREAD: self.encodings,
            FETCHES_THREAD: self.fetches,
            SHARES_THREAD: self.shares,
        }
        return {name: end for name, end in ends.items() if end is not None}


AnyNode = TypeVar("AnyNode", bound=Node)


class NodeOnThread(Generic[AnyNode]):
    """A node whose loop runs on a thread of its own: the calls that all roles answer equally.

    A subclass makes the three parts in its constructor, and starts the thread.
    """

    _loop: EngineLoop
    _node: AnyNode
    _end: ConnectorEnd

    def submit(self, command: RouterCommand | AbortAll) -> None:
        self._node.submit(command)
        self._loop.wake()

    def beat(self) -> NodeBeat:
        return self._node.beat()

    def requests(self) -> list[RequestView]:
        return self._node.requests()

    def ledger(self) -> Future[Ledger]:
        return self._loop.call(self._node.ledger)

    def rounds(self) -> dict[str, Rounds]:
        return {ENGINE_THREAD: self._loop.rounds, KV_THREAD: self._end.rounds}

    def handoff_metrics(self) -> HandoffMetrics:
        return self._node.handoff_metrics()

    def connector_metrics(self) -> ConnectorMetrics:
        return self._end.metrics()


class NodeThreads(NodeOnThread[Node]):
    """A node and its engine's thread; see `node_runtime.node_program.NodeProgram` for the contract.

    Args:
        name: name of the node.
        role: role of the node.
        loaded: the engine that the node steps.
        make_node: makes the node and its ends of the KV connector, given a function that wakes the
            engine's thread.
        emit: sends events to the router; called on the engine's thread.
        on_death: called with the error when the engine cannot continue.
        pushes: whether the node sends the KV of a prompt's layers while it computes later layers.
        on_close: called when the threads of engine and connector have ended.
        adapter_root: folder below which adapters may be loaded; None: no adapter may be loaded.
        weights_root: folder below which new weights may be loaded; None: no weights may be loaded.
        vllm_model: model name in metrics with vLLM's names; empty: no metrics with these names.
        hang_at: injected fault: the engine's thread hangs after this many busy rounds; 0: never.
        poison: injected fault: the process is killed when a request runs whose id contains this
            text; empty: never.
    """

    def __init__(
        self,
        name: str,
        role: NodeRole,
        loaded: LoadedEngine,
        make_node: Callable[[Callable[[], None]], tuple[Node, ConnectorEnds]],
        emit: Callable[[NodeEvent], None],
        on_death: Callable[[Exception], None],
        *,
        pushes: bool = False,
        on_close: Callable[[], None] = lambda: None,
        adapter_root: Path | None = None,
        weights_root: Path | None = None,
        vllm_model: str = "",
        hang_at: int = 0,
        poison: str = "",
    ) -> None:
        self._name = name
        self._role = role
        self._loaded = loaded
        self._pushes = pushes
        self._first_steps = FirstSteps()
        self._rested = False  # whether the last beat said that the node rests
        self._on_close = on_close
        self._vllm_model = vllm_model
        self._hang_at, self._num_busy, self._poison = hang_at, 0, poison
        self._kv_events = KVEventFeed(loaded.engine.block_pool, emit)
        self._loop = EngineLoop(
            *(self._step, on_death),
            name=ENGINE_THREAD,
            when_idle=loaded.engine.do_idle_work,
            after_death=self.dump,
            tick_s=self._tick_s,
        )
        self.adapters = NodeAdapters(loaded.engine, self._loop.ask, adapter_root)
        self.weights: NodeWeights | None = None
        if loaded.weights is not None:
            changing = loaded.weights, self._loop.ask, weights_root, self._rename
            self.weights = NodeWeights(loaded.engine, *changing)
        loaded.engine.features.wake_with(self._loop.wake)
        self._node, self._ends = make_node(self._loop.wake)
        self._end = self._ends.kv
        self._loop.start()

    def beat(self) -> NodeBeat:
        beat = super().beat()
        self._rested = beat.rests
        return beat

    def compute_first_steps(self) -> Future[None]:
        def compute() -> None:
            self._first_steps = compute_first_steps(self._loaded.engine, pushes=self._pushes)

        return self._loop.call(compute)

    def registration(self, address: str) -> NodeRegistration:
        peer_info = self._end.describe()
        registered = self._loaded.registration(
            self._name, self._role, address, peer_info, self._first_steps
        )
        ends = self._ends
        return replace(
            registered,
            encodings_peer_info=ends.encodings.describe() if ends.encodings else b"",
            fetch_peer_info=ends.fetches.describe() if ends.fetches else b"",
            share_peer_info=ends.shares.describe() if ends.shares else b"",
        )

    def submit(self, command: RouterCommand | AbortAll) -> None:
        if isinstance(command, SendKVSnapshot):
            self._kv_events.request_snapshot()
            self._loop.wake()
        else:
            super().submit(command)

    def flush_prefix_cache(self) -> Future[int]:
        def flush() -> int:
            engine = self._loaded.engine
            num_prefixes = engine.block_pool.num_cached
            engine.block_pool.reset_prefix_cache()
            engine.features.forget_prefixes()
            return num_prefixes

        return self._loop.call(flush)

    def rounds(self) -> dict[str, Rounds]:
        others = {name: end.rounds for name, end in self._ends.others().items()}
        return super().rounds() | others

    def dump(self, error: Exception) -> None:
        """Write a crash dump of the engine; never raises, but may hang on a dead disk."""
        dump_crash(self._loaded.engine, error)

    def collector(self) -> NodeCollector:
        return NodeCollector(self._role, self._name, self, vllm_model=self._vllm_model)

    def engine_metrics(self) -> EngineMetrics:
        return self._loaded.engine.metrics()

    def _rename(self) -> None:
        """Let later registrations describe the weights that the engine has now."""
        self._loaded = self._loaded.renamed()

    def _step(self) -> bool:
        self._loaded.engine.executor.check_health()  # a rank may also die between steps
        if self.weights is not None and self.weights.is_asleep:
            # Commands wait in the inbox: a router may send some before it learns of the drain.
            self._kv_events.after_step(busy=False)  # the sleep has emptied the prefix cache
            return False
        busy = self._node.step()
        self._num_busy += busy
        if self._hang_at and self._num_busy >= self._hang_at:
            logger.warning("the engine's thread stands still (an injected fault)")
            while True:
                time.sleep(1.0)
        if self._poison and self._is_poisoned():
            os.kill(os.getpid(), signal.SIGKILL)
        self._kv_events.after_step(busy=busy)
        return busy

    def _tick_s(self) -> float:
        """Return how long the engine thread sleeps at most: short while requests have deadlines."""
        # A new command wakes the thread in any case
        rests = self._rested and not self._loaded.engine.requests
        return REST_TICK_S if rests else TICK_S

    def _is_poisoned(self) -> bool:
        return any(
            self._poison in view.request_id and view.status == RequestStatus.RUNNING.value
            for view in self._node.requests()
        )

    def close(self) -> None:
        self._loop.stop()
        self._end.close()
        for end in self._ends.others().values():
            end.close()
        self._loaded.engine.close()
        if self._loaded.weights is not None:
            self._loaded.weights.close()
        self._on_close()
