"""SimNode: one simulated node: its link to the router, its half of the simulator, its faults.

A node is one incarnation (one engine id). `stop` and `go_on` are what SIGSTOP and SIGCONT are to a
real one: stopped, it says nothing, does nothing, and does not dial again.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Protocol

from baton.access.tls import NO_TLS, TlsOptions
from baton.api.errors import ConfigError
from baton.block_hash import BlockHasher, cache_namespace
from baton.link.drain import Drain
from baton.link.router_links import RouterLinks
from baton.link.words import (
    REVISION,
    AbortAll,
    CancelCommand,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RouterCommand,
    SendKVSnapshot,
)
from baton.version import __version__
from sim_node.clock import NodeClock
from sim_node.decode import SimDecode
from sim_node.faults import FaultSpec
from sim_node.kv_cache import SimKVCache
from sim_node.kv_events import KVEventLog
from sim_node.kv_network import TRANSPORT, KVMessage, KVNetwork
from sim_node.node_parts import NodeParts, SimEngine
from sim_node.options import SimModel, SimOptions
from sim_node.prefill import SimPrefill


class NodeLinks(Protocol):
    """What a node needs of its links to routers; see `RouterLinks`."""

    async def run(self) -> None: ...
    def emit(self, event: NodeEvent) -> None: ...
    def beat(self, beat: NodeBeat) -> None: ...


class SimNode:
    """One node, from its start to its end.

    Args:
        name: of the node, also after a restart.
        router: ``host:port``.
        network: of this process.
        faults: what it does wrong by itself.
        join_timeout_s: how long to try to reach the router for the first time.
        node_token: shows the router that this node may join.
        tls: shows it who this node is.
        make_links: called as `RouterLinks` is; measurements join a router of the same process.
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
        self._network = network
        self._options = options
        self._refuse = faults.refuse
        self._random = random.Random(f"{faults.seed} {self.engine_id}")
        self._drain = Drain()
        self._going = asyncio.Event()
        self._going.set()
        cache = SimKVCache(options.num_blocks)
        self._log = KVEventLog(cache, self._emit)
        self._parts = NodeParts(
            engine_id=self.engine_id,
            model=model,
            options=options,
            timing=options.timing,
            clock=self.clock,
            cache=cache,
            hasher=BlockHasher(
                options.block_size, options.prefix_hash, cache_namespace(model.identity)
            ),
            network=network,
            emit=self._emit,
        )
        make_engine = SimPrefill if role is NodeRole.PREFILL else SimDecode
        self._engine: SimEngine = make_engine(self._parts, self._log)
        self._links = make_links(
            [router],
            self._registration(network.add(self.engine_id, self._take_message)),
            self._submit,
            self._drain,
            on_joined=self._note_joined,
            on_stop=self._drain.begin,  # the others of this process go on
            join_timeout_s=join_timeout_s,
            node_token=node_token,
            tls=tls,
        )
        self.task = asyncio.create_task(self._links.run())

    @property
    def num_tokens_made(self) -> int:
        return self._parts.num_tokens_made

    @property
    def num_running(self) -> int:
        return self._engine.beat().num_running

    # ------------------------------------------------------------------ its life

    def stop(self) -> None:
        """Stand still: silent, and deaf."""
        self._going.clear()
        self.clock.stop()

    def go_on(self) -> None:
        """Do all that was due meanwhile."""
        self._going.set()
        self.clock.go_on()

    def slow_down(self, factor: float) -> None:
        """Take so many times as long as usual from the next step on; 1 is as usual."""
        self._parts.timing = self._options.timing.scaled(factor)

    async def end(self) -> None:
        """Vanish, as a killed process does."""
        self.clock.end()
        self._network.remove(self.engine_id)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def beat(self) -> None:
        """Say how busy it is; to be called once per beat interval."""
        if self._going.is_set():
            self._engine.expire()
            self._log.flush()
            self._links.beat(self._engine.beat())

    # ------------------------------------------------------------------ the link

    def _registration(self, peer_info: bytes) -> NodeRegistration:
        model, options = self._parts.model, self._options
        return NodeRegistration(
            node_name=self.name,
            engine_id=self.engine_id,
            role=self.role,
            version=__version__,
            address="",  # nobody can ask it anything
            peer_info=peer_info,
            compatibility={
                **model.identity,
                "block_size": str(options.block_size),
                "kv_connector": TRANSPORT,
                "version": __version__,
                **({REVISION: options.revision} if options.revision else {}),
            },
            max_model_len=model.max_model_len,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            prefix_hash=options.prefix_hash,
            kv_bytes_per_token=float(options.timing.kv_bytes_per_token),
            computes_prompts=self.role is NodeRole.DECODE,
        )

    async def _note_joined(self, joined: bool) -> None:
        if joined:
            self.joined.set()
        else:
            self.joined.clear()
            await self._going.wait()  # who stands still does not dial

    def _emit(self, event: NodeEvent) -> None:
        self._links.emit(event)

    def _submit(self, command: RouterCommand | AbortAll) -> None:
        self.clock.run(lambda: self._take(command))

    def _take_message(self, message: KVMessage) -> None:
        self.clock.run(lambda: self._engine.take_message(message))

    def _take(self, command: RouterCommand | AbortAll) -> None:
        match command:
            case PrefillCommand() | DecodeCommand():
                if self._refuse and self._random.random() < self._refuse:
                    problem = f"{self.role.value}: refused (an injected fault)"
                    self._parts.fail(command.request_id, command.epoch, "UNAVAILABLE", problem)
                else:
                    self._engine.take(command)
            case CancelCommand():
                self._engine.take(command)
            case PeerUpdate(removed=True):
                self._engine.lose_peer(command.engine_id)
            case PeerUpdate():
                problem = self._network.problem(command.peer_info)
                self._emit(
                    PeerReport(
                        command.engine_id,
                        not problem,
                        TRANSPORT,
                        problem,
                        0.0 if problem else self._options.timing.link_bytes_per_s,
                    )
                )
            case SendKVSnapshot():
                self._log.begin()
            case AbortAll():
                self._engine.abort_all(command)
            case _:
                raise ConfigError(f"a simulated node takes no {type(command).__name__}")
