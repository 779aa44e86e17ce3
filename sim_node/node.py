"""SimNode: a real node with a simulated executor and a link to the router.

    command -> PrefillNode or DecodeNode -> Engine -> SimExecutor       a step's end is a timer
                   |
               Sender or Receiver -> SimTransport                        and a write's end

A node keeps its engine id from its start to its end. `stop` and `go_on` act like SIGSTOP and
SIGCONT: a stopped node does nothing, and does not reconnect.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from baton.access.tls import NO_TLS, TlsOptions
from baton.link.drain import Drain
from baton.link.router_links import RouterLinks
from baton.link.words import (
    REVISION,
    AbortAll,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RequestError,
    RouterCommand,
    SendKVSnapshot,
    failed_delta,
)
from baton.version import __version__
from decode_node.node import DecodeNode
from decode_node.options import DecodeOptions
from engine.make_engine import make_engine
from kvconnector.ends import Receiver, Sender
from node_runtime.node_engine import FirstSteps, LoadedEngine
from node_runtime.reports.kv_event_feed import KVEventFeed
from prefill_node.node import PrefillNode
from sim_node.clock import NodeClock
from sim_node.connector import TRANSPORT, KVNetwork, SimReceiver, SimTransport, make_sender
from sim_node.executor import SimExecutor, engine_config
from sim_node.faults import FaultSpec
from sim_node.options import SimModel, SimOptions

IDLE_BEATS = 2  # a node without requests checks deadlines at every second beat


class NodeLinks(Protocol):
    """The part of `RouterLinks` that a simulated node needs."""

    async def run(self) -> None: ...
    def emit(self, event: NodeEvent) -> None: ...
    def beat(self, beat: NodeBeat, num_intervals: int) -> int: ...


class SimNode:
    """Runs one node from its start to its end.

    Args:
        name: the node's name, which stays the same after a restart.
        router: ``host:port`` of the router.
        network: KV network of all nodes in the process.
        faults: faults to inject into the node.
        join_timeout_s: maximum number of seconds for the first join.
        node_token: authorizes the node to join.
        tls: certificates of the node.
        make_links: makes the links to routers; benchmarks replace it to use a router in the same
            process.
    """

    def __init__(
        self,
        name: str,
        role: NodeRole,
        router: str,
        network: KVNetwork,
        model: SimModel,
        options: SimOptions,
        faults: FaultSpec,
        *,
        join_timeout_s: float,
        node_token: str = "",
        tls: TlsOptions = NO_TLS,
        make_links: Callable[..., NodeLinks] = RouterLinks,
    ) -> None:
        self.name, self.role = name, role
        self.engine_id = f"{name}-{uuid.uuid4().hex[:8]}"
        self.joined = asyncio.Event()
        self.clock = NodeClock(asyncio.get_running_loop())
        self._going = asyncio.Event()
        self._going.set()
        self._drain = Drain()
        # After how many beat intervals the next beat is due, and how many have passed
        self._pause, self._num_intervals = 1, 0
        self.simulation = Simulation(
            self.engine_id, role, network, model, options, faults, self.clock, self._emit
        )
        self._links = make_links(
            [router],
            self.simulation.registration(name),
            lambda command: self.clock.run(lambda: self.simulation.handle_command(command)),
            self._drain,
            on_joined=self._note_joined,
            on_stop=self._drain.begin,  # drain only this node: other nodes of the process go on
            join_timeout_s=join_timeout_s,
            node_token=node_token,
            tls=tls,
        )
        self.task = asyncio.create_task(self._links.run())

    def stop(self) -> None:
        """Pause the node: until `go_on`, it sends nothing and reacts to nothing."""
        self._going.clear()
        self.clock.stop()

    def go_on(self) -> None:
        """Continue the node, which then handles the events that became due."""
        self._going.set()
        self.clock.go_on()

    async def kill(self) -> None:
        """End the node abruptly, like a killed process."""
        self.clock.halt()
        self.simulation.kill()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def beat(self) -> None:
        """Report the node's load to the router, if a beat is due; call once per beat interval."""
        if not self._going.is_set():
            return
        self._num_intervals += 1
        if self._num_intervals >= self._pause or self.simulation.engine.requests:
            self._pause = self._links.beat(self.simulation.beat(), self._num_intervals)
            self._num_intervals = 0

    async def _note_joined(self, joined: bool) -> None:
        if joined:
            self.joined.set()
        else:
            self.joined.clear()
            await self._going.wait()  # a paused node must not reconnect to the router

    def _emit(self, event: NodeEvent) -> None:
        self._links.emit(event)


class Simulation:
    """The engine and the connector of one node, which run on timers.

    Args:
        engine_id: id of this start of the node.
        role: the node's role.
        network: KV network of all nodes in the process.
        model: the model that the node pretends to serve.
        options: sizes and timing of the node.
        faults: faults to inject into the node.
        clock: the node's clock.
        emit: sends events to the router.
    """

    def __init__(
        self,
        engine_id: str,
        role: NodeRole,
        network: KVNetwork,
        model: SimModel,
        options: SimOptions,
        faults: FaultSpec,
        clock: NodeClock,
        emit: Callable[[NodeEvent], None],
    ) -> None:
        self.engine_id, self._role = engine_id, role
        self._network, self._options, self._clock, self._emit = network, options, clock, emit
        self._refuse = faults.refuse
        self._random = random.Random(f"{faults.seed} {engine_id}")
        self._executor = SimExecutor(model, options, role, clock, self._look_later)
        self.engine = make_engine(
            Path(), engine_config(options, role), model.identity, executor=self._executor
        )
        self._executor.requests = self.engine.requests
        transport = SimTransport(
            engine_id,
            network,
            self.engine.kv_memory.manifest,
            options.num_blocks,
            timing=lambda: self._executor.timing,
            clock=clock,
            on_arrival=self._look_later,
        )
        self._end: Sender | Receiver
        self.node: PrefillNode | DecodeNode
        if role is NodeRole.PREFILL:
            sender = make_sender(
                transport, network, clock.now, on_event=self._wake, on_death=_raise
            )
            self.node, self._end = PrefillNode(self.engine, sender, emit, clock=clock.now), sender
        else:
            receiver = SimReceiver(
                transport, network, clock.now, on_event=self._wake, on_death=_raise
            )
            decode = DecodeOptions(local_prefill_threshold=options.local_prefill_threshold)
            self.node = DecodeNode(self.engine, receiver, emit, decode, clock=clock.now)
            self._end = receiver
        self._kv_events = KVEventFeed(self.engine.block_pool, emit, clock=clock.now)
        self._num_beats = 0
        self._met: set[str] = set()  # engine ids of the peers of which the node was told
        self._step_is_due = self._is_awake = self._look_is_due = False

    # ------------------------------------------------------------------ called by SimNode

    @property
    def num_tokens_made(self) -> int:
        """Return the number of output tokens made so far, whether or not clients received them."""
        return self._executor.num_tokens

    def registration(self, name: str) -> NodeRegistration:
        """Return the node's registration for the router."""
        compatibility = {
            **self.engine.compatibility,
            "kv_connector": TRANSPORT,
            "version": __version__,
            **({REVISION: self._options.revision} if self._options.revision else {}),
        }
        loaded = LoadedEngine(self.engine, self.engine_id, compatibility, self._options.prefix_hash)
        peer_info = self._network.peer_info(self.engine_id)
        executor = self._executor
        first_steps = FirstSteps(
            executor.step_times(), executor.decode_times(), executor.context_times()
        )
        # The address is empty, because simulated nodes accept no connections.
        return loaded.registration(name, self._role, "", peer_info, first_steps)

    def slow_down(self, factor: float) -> None:
        """Multiply the durations of steps and transfers by a factor from now on; 1 is normal."""
        self._executor.timing = self._options.timing.scaled(factor)

    def beat(self) -> NodeBeat:
        """Return the node's load; check deadlines, too, as a real idle node does.

        Nodes without requests check only at every `IDLE_BEATS`-th beat, so that thousands of idle
        nodes need little CPU time.
        """
        self._num_beats += 1
        if self.engine.requests or self._num_beats % IDLE_BEATS == 0:
            self._look_later()
            self._wake()
        return self.node.beat()

    def kill(self) -> None:
        """End abruptly: remove the node from the network."""
        self._network.remove(self.engine_id)

    def handle_command(self, command: RouterCommand | AbortAll) -> None:
        """Handle a command of the router: give it to the node, which may then run a round."""
        match command:
            case PrefillCommand() | DecodeCommand():
                self._begin(command)
            case PeerUpdate(removed=False):
                self._report(command)
                return
            case PeerUpdate():
                self._met.discard(command.engine_id)
                self.node.submit(command)
            case SendKVSnapshot():
                self._kv_events.request_snapshot()
            case _:
                self.node.submit(command)
        self._wake()

    # ------------------------------------------------------------------ commands

    def _begin(self, command: PrefillCommand | DecodeCommand) -> None:
        """Submit a command or refuse it; first tell the node of the peer that the command names.

        A node is told of a peer only when a command needs it, because most of the many pairs of
        nodes never work together.
        """
        problem, code = self._problem(command), "INVALID_ARGUMENT"
        if self._refuse and self._random.random() < self._refuse:
            problem = f"{self._role.value}: refused (an injected fault)"
            code = "UNAVAILABLE"
        if problem:
            error = RequestError(code, problem)
            self._emit((failed_delta(command.request_id, command.epoch, error),))
            return
        peer = (
            command.decode_engine_id
            if isinstance(command, PrefillCommand)
            else command.prefill_engine_id
        )
        if peer in self._network and peer not in self._met:
            self._met.add(peer)
            self.node.submit(PeerUpdate(peer, self._network[peer].peer_info.encode()))
        # Drop the parameters that need logits, because a simulated model has no logits.
        params = replace(
            command.sampling_params,
            structured_output=None,
            thinking=None,
            logprobs=None,
            prompt_logprobs=None,
        )
        self.node.submit(replace(command, sampling_params=params))

    def _problem(self, command: PrefillCommand | DecodeCommand) -> str:
        """Return why the earlier output in a command is wrong: a retry has lost or mixed tokens.

        The result is empty if the earlier output is right for the prompt.
        """
        if not command.output_token_ids:
            return ""
        output = self._executor.outputs.output_of(command.prompt_token_ids)
        for index, token_id in enumerate(command.output_token_ids):
            if token_id != output(index):
                return f"output_token_ids: token {index} is not of this prompt, got {token_id}"
        return ""

    def _report(self, update: PeerUpdate) -> None:
        problem = self._network.problem(update.peer_info)
        rate = 0.0 if problem else self._options.timing.link_bytes_per_s
        if isinstance(self.node, DecodeNode):
            self.node.note_prefill_node(update.engine_id, is_connected=not problem)
        self._emit(PeerReport(update.engine_id, not problem, TRANSPORT, problem, rate))

    # ------------------------------------------------------------------ stepping

    def _wake(self) -> None:
        """Run a round of the node now, or as soon as the step in flight has ended."""
        if self._step_is_due:
            self._is_awake = True
        else:
            self._step_is_due = True
            self._clock.call_at(self._clock.now(), self._step)

    def _step(self, now: float) -> None:
        self._is_awake = False
        executor = self._executor
        executor.now = now
        busy = self.node.step()
        self._kv_events.after_step(busy=busy)
        if self._end.loop.has_wishes:
            self._end.loop.round()
        if self.engine.step_in_flight:
            self._clock.call_at(executor.busy_until, self._step)
        elif busy or self._is_awake:
            self._clock.call_at(self._clock.now(), self._step)
        else:
            self._step_is_due = False

    def _look_later(self) -> None:
        """Run a round of the connector after the current callback has returned."""
        if not self._look_is_due:
            self._look_is_due = True
            self._clock.call_at(self._clock.now(), self._look)

    def _look(self, now: float) -> None:
        self._look_is_due = False
        self._end.loop.round()


def _raise(error: Exception) -> None:
    raise error
