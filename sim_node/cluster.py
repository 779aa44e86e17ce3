"""SimCluster: runs many simulated nodes in one event loop, and can disturb each node.

    async with SimCluster("127.0.0.1:50051", model, num_prefill=8, num_decode=8) as cluster:
        await cluster.kill("sim-d3")
        await cluster.restart("sim-d3")

A prefill node and a decode node that work together must be in the same cluster, because KV
transfers do not use the network.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from baton.access.tls import NO_TLS, TlsOptions
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.checkpoint.model_folder import find_model_folder, read_limits
from baton.checkpoint.model_identity import SIMULATED, folder_identity
from baton.link.router_links import RouterLinks
from baton.link.words import BEAT_INTERVAL_S, NodeRole
from engine.engine import Engine
from sim_node.connector import KVNetwork
from sim_node.faults import FaultSpec
from sim_node.node import NodeLinks, SimNode
from sim_node.options import SimModel, SimOptions
from sim_node.sim_model import OutputSource

logger = logging.getLogger(__name__)

# Number of parts of a beat interval over which the beats of nodes are spread, so that not all nodes
# send at once.
_NUM_BEAT_SLICES = 10
_MAX_JOINING = 16  # default number of nodes that join at a time
_MAX_CONNECTING = 32  # maximum number of links of the process that connect at a time
_DEFAULT_OPTIONS = SimOptions()
_NO_FAULTS = FaultSpec()


@dataclass(frozen=True, slots=True)
class SimStats:
    """Figures of a cluster since its start.

    Attributes:
        num_tokens: number of output tokens made, whether or not clients received them.
        num_running: number of requests in progress, over all nodes.
        cpu_s: CPU seconds of the whole process.
        max_lag_s: longest delay of a timer, in seconds; if it is much longer than a step, the
            machine is too busy for so many nodes, and measured times are wrong.
    """

    num_tokens: int
    num_running: int
    elapsed_s: float
    cpu_s: float
    max_lag_s: float


class SimCluster:
    """Runs simulated nodes for one router.

    Args:
        router: ``host:port`` of the router.
        model: model folder, GGUF file, or hub id; only the model's configuration is read.
        options: sizes and timing of every node.
        faults: faults to inject into nodes.
        prefix: prefix of node names: ``sim-p0``, ``sim-d0`` and so on.
        join_timeout_s: seconds for which to try to reach the router.
        node_token: authorizes the nodes to join.
        tls: certificates of the nodes.
        make_links: makes the links to routers, see `SimNode`; None: real links.
        outputs: source of the model's outputs; None: tokens are hashes of the prompt.
        max_joining: maximum number of nodes that join at a time.

    Raises:
        ModelLoadError: the model's configuration cannot be read.
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        router: str,
        model: str,
        *,
        num_prefill: int,
        num_decode: int,
        options: SimOptions = _DEFAULT_OPTIONS,
        faults: FaultSpec = _NO_FAULTS,
        prefix: str = "sim",
        join_timeout_s: float = 30.0,
        node_token: str = "",
        tls: TlsOptions = NO_TLS,
        make_links: Callable[..., NodeLinks] | None = None,
        outputs: OutputSource | None = None,
        max_joining: int = _MAX_JOINING,
    ) -> None:
        if num_prefill < 0 or num_decode < 0 or num_prefill + num_decode == 0:
            raise ConfigError(
                f"prefill, decode: must be 0 or more, and not both 0, got {num_prefill}, "
                f"{num_decode}"
            )
        self._router = router
        self._model = _read_model(model, options, outputs)
        self._options = options
        self._faults = faults
        self._join_timeout_s = join_timeout_s
        self._node_token = node_token
        self._tls = tls
        # In a real fleet, each node connects from its own process, so this limit is only needed
        # here.
        turns = asyncio.Semaphore(_MAX_CONNECTING)
        self._make_links = make_links or partial(RouterLinks, turns=turns)
        self._max_joining = max_joining
        self._network = KVNetwork()
        roles = [(NodeRole.PREFILL, "p", num_prefill), (NodeRole.DECODE, "d", num_decode)]
        self._roles = {
            f"{prefix}-{letter}{index}": role
            for role, letter, count in roles
            for index in range(count)
        }
        chance = random.Random(faults.seed)
        num_slow = round(faults.slow * len(self._roles))
        self._slowness = dict.fromkeys(chance.sample(self.names, num_slow), faults.slow_factor)
        self._chance = chance
        self._nodes: dict[str, SimNode] = {}  # running or paused nodes, by name
        self._jobs: list[asyncio.Task[None]] = []
        self._num_tokens_before = 0  # output tokens of nodes that have ended
        self._max_lag_before_s = 0.0
        self._started = (0.0, 0.0)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start all nodes, and wait until all have joined the router.

        Raises:
            NodeUnavailableError: the router does not answer.
            ConfigError: the router refused a node.
        """
        self._started = (time.perf_counter(), time.process_time())
        self._jobs = [asyncio.create_task(self._beat())]
        try:
            for first in range(0, len(self.names), self._max_joining):
                some = self.names[first : first + self._max_joining]
                await asyncio.gather(*(self.restart(name) for name in some))
        except BaseException:
            await self.stop()
            raise
        self._jobs += [
            asyncio.create_task(self._inject(self._faults.kill, self._kill_for_a_while)),
            asyncio.create_task(self._inject(self._faults.stall, self._stall_for_a_while)),
        ]

    async def stop(self) -> None:
        """Stop injecting faults, and end all nodes abruptly."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(self.kill(name) for name in list(self._nodes)))

    async def run(self) -> None:
        """Run until a node fails; raise the node's error."""
        while True:
            for node in self._nodes.values():
                if node.task.done():
                    node.task.result()
            for job in [job for job in self._jobs if job.done()]:
                job.result()
                self._jobs.remove(job)
            await asyncio.sleep(BEAT_INTERVAL_S)

    async def __aenter__(self) -> SimCluster:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # ------------------------------------------------------------------ disturbances

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes, including nodes that are down."""
        return list(self._roles)

    async def kill(self, name: str) -> None:
        """End a node abruptly, as by SIGKILL; do nothing if it is down."""
        node = self._nodes.pop(name, None)
        if node is not None:
            self._num_tokens_before += node.simulation.num_tokens_made
            self._max_lag_before_s = max(self._max_lag_before_s, node.clock.max_lag_s)
            await node.kill()

    async def restart(self, name: str) -> None:
        """Start a node again, after ending it if it runs; return when it has joined."""
        await self.kill(name)
        node = SimNode(
            name,
            self._roles[name],
            self._router,
            self._network,
            self._model,
            self._options,
            self._faults,
            join_timeout_s=self._join_timeout_s,
            node_token=self._node_token,
            tls=self._tls,
            make_links=self._make_links,
        )
        self._nodes[name] = node
        self.slow(name, self._slowness.get(name, 1.0))
        joined = asyncio.create_task(node.joined.wait())
        try:
            await asyncio.wait([joined, node.task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
        if node.task.done() and not node.task.cancelled():
            node.task.result()

    async def stall(self, name: str, stall_s: float) -> None:
        """Pause a node for ``stall_s`` seconds, as by SIGSTOP; return at once."""
        node = self._node(name)
        node.stop()
        asyncio.get_running_loop().call_later(stall_s, node.go_on)

    def slow(self, name: str, factor: float) -> None:
        """Multiply the durations of a node's steps and transfers by ``factor``; 1 is normal."""
        self._node(name).simulation.slow_down(factor)

    def engine(self, name: str) -> Engine:
        """Return a node's engine, with its blocks and prefix cache."""
        return self._node(name).simulation.engine

    def stats(self) -> SimStats:
        wall, cpu = self._started
        nodes = self._nodes.values()
        return SimStats(
            self._num_tokens_before + sum(node.simulation.num_tokens_made for node in nodes),
            sum(node.simulation.node.beat().num_running for node in nodes),
            time.perf_counter() - wall,
            time.process_time() - cpu,
            max([self._max_lag_before_s, *(node.clock.max_lag_s for node in nodes)]),
        )

    def _node(self, name: str) -> SimNode:
        node = self._nodes.get(name)
        if node is None:
            raise NodeUnavailableError(f"simulated node {name} is not running")
        return node

    # ------------------------------------------------------------------ random faults

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for slice_index in itertools.cycle(range(_NUM_BEAT_SLICES)):
            for node in list(self._nodes.values())[slice_index::_NUM_BEAT_SLICES]:
                node.beat()
            due = max(due + BEAT_INTERVAL_S / _NUM_BEAT_SLICES, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _inject(
        self, per_minute: float, act: Callable[[str], Coroutine[None, None, None]]
    ) -> None:
        """Call ``act`` with random nodes, ``per_minute`` times per node, until cancelled."""
        if not per_minute:
            return
        while True:
            await asyncio.sleep(self._chance.expovariate(per_minute * len(self._roles) / 60))
            if self._nodes:
                name = self._chance.choice(list(self._nodes))
                self._jobs.append(asyncio.create_task(act(name)))

    async def _kill_for_a_while(self, name: str) -> None:
        logger.info("%s is killed", name)
        await self.kill(name)
        await asyncio.sleep(self._faults.restart_s)
        await self.restart(name)

    async def _stall_for_a_while(self, name: str) -> None:
        logger.info("%s stands still for %g s", name, self._faults.stall_s)
        await self.stall(name, self._faults.stall_s)


def _read_model(model: str, options: SimOptions, outputs: OutputSource | None) -> SimModel:
    folder = find_model_folder(model, weights=False)
    limits = read_limits(folder)
    longest = min(
        options.max_model_len or limits.max_position_embeddings,
        limits.max_position_embeddings,
        options.num_blocks * options.block_size,  # a request must fit into the cache
    )
    identity = {**folder_identity(folder), "weights": SIMULATED}
    return SimModel(
        identity=identity,
        vocab_size=limits.vocab_size,
        max_model_len=longest,
        outputs=outputs,
    )
