"""Simulated nodes on virtual time, without an event loop: their events, and the events' times."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

from baton.api.sampling_params import SamplingParams
from baton.link.words import (
    CancelCommand,
    DecodeCommand,
    KVCacheEvents,
    NodeEvent,
    NodeRole,
    PeerUpdate,
    PrefillCommand,
    RequestDelta,
)
from sim_node.clock import NodeClock
from sim_node.connector import KVNetwork
from sim_node.faults import FaultSpec
from sim_node.node import Simulation
from sim_node.options import SimModel, SimOptions
from sim_node.sim_model import OutputSource
from sim_node.timing import TimingModel

VOCAB_SIZE = 1000
# Round numbers: 1 ms per prompt token, 10 ms per decode step, 1 ms per token to send.
TIMING = TimingModel(
    prefill_tokens_per_s=1000,
    prefill_step_s=0.0,
    prefill_s_per_pair=0.0,
    decode_step_s=0.01,
    decode_s_per_request=0.0,
    decode_s_per_kv_token=0.0,
    kv_bytes_per_token=8,
    link_bytes_per_s=8000,
    link_latency_s=0.0,
)


class VirtualTimers:
    """Timers on virtual time, which passes only in `run`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        heapq.heappush(self._due, (when, next(self._numbers), callback))
        return cast("asyncio.TimerHandle", None)  # no one cancels

    def run(self, until: float = 1000.0) -> None:
        """Run all timers due up to a time, and set the clock to that time."""
        while self._due and self._due[0][0] <= until:
            when, _, callback = heapq.heappop(self._due)
            self.now = max(self.now, when)
            callback()
        self.now = until


class SimPair:
    """A prefill node and a decode node that are connected, and their events for the router."""

    def __init__(
        self,
        *,
        timing: TimingModel = TIMING,
        max_model_len: int = 1000,
        vocab_size: int = VOCAB_SIZE,
        outputs: OutputSource | None = None,
        **sizes: Any,
    ):
        self.timers = VirtualTimers()
        self.network = KVNetwork()
        self.events: list[tuple[float, str, NodeEvent]] = []  # when, who, what
        self.options = SimOptions(timing=timing, **{"block_size": 4, "num_blocks": 100, **sizes})
        self.model = SimModel(
            identity={"model": "d"},
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            outputs=outputs,
        )
        self.clocks = {name: NodeClock(self.timers) for name in ("p", "d")}
        roles = {"p": NodeRole.PREFILL, "d": NodeRole.DECODE}
        self.nodes = {name: self._make_node(name, role) for name, role in roles.items()}

    def _make_node(self, name: str, role: NodeRole) -> Simulation:
        def emit(event: NodeEvent) -> None:
            self.events.append((self.timers.now, name, event))

        clock = self.clocks[name]
        return Simulation(
            name, role, self.network, self.model, self.options, FaultSpec(), clock, emit
        )

    def send(
        self,
        request_id: str,
        prompt: list[int],
        *,
        output: tuple[int, ...] = (),
        epoch: int = 1,
        timeout_s: float = 100.0,
        **params: Any,
    ) -> None:
        """Send both legs of a request, as a router does."""
        self.send_decode(request_id, prompt, output=output, epoch=epoch, **params)
        self.nodes["p"].handle_command(
            PrefillCommand(
                request_id=request_id,
                epoch=epoch,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(**params),
                decode_engine_id="d",
                timeout_s=timeout_s,
                output_token_ids=output,
            )
        )

    def send_decode(
        self,
        request_id: str,
        prompt: list[int],
        *,
        output: tuple[int, ...] = (),
        epoch: int = 1,
        prefill: str = "p",
        **params: Any,
    ) -> None:
        self.nodes["d"].handle_command(
            DecodeCommand(
                request_id=request_id,
                epoch=epoch,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(**params),
                prefill_engine_id=prefill,
                timeout_s=100.0,
                output_token_ids=output,
            )
        )

    def cancel(self, request_id: str, epoch: int = 1) -> None:
        for name in "dp":
            self.nodes[name].handle_command(CancelCommand(request_id, epoch))

    def deltas(self, request_id: str, who: str = "pd") -> list[tuple[float, RequestDelta]]:
        """Return the halves' deltas of a request with their times, in order of the output."""
        found = [
            (when, delta)
            for when, name, event in self.events
            if isinstance(event, tuple) and name in who
            for delta in event
            if delta.request_id == request_id
        ]
        return sorted(found, key=lambda item: item[1].output_index)

    def tokens(self, request_id: str, who: str = "pd") -> tuple[int, ...]:
        return tuple(t for _, delta in self.deltas(request_id, who) for t in delta.token_ids)

    def errors(self, request_id: str) -> list[str]:
        return [delta.error.code for _, delta in self.deltas(request_id) if delta.error is not None]

    def cache_events(self, who: str) -> list[KVCacheEvents]:
        return [e for _, name, e in self.events if name == who and isinstance(e, KVCacheEvents)]

    def lose(self, who: str, peer: str) -> None:
        """Tell a node that a peer is gone, as the router does."""
        self.nodes[who].handle_command(PeerUpdate(peer, removed=True))

    def check_nothing_is_held(self) -> None:
        for node in self.nodes.values():
            node.engine.check()
            assert node.engine.block_pool.num_free == node.engine.num_blocks
