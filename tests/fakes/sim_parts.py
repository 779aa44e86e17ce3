"""Halves of the simulator on virtual time: what they say, and when, without an event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

from baton.api.sampling_params import SamplingParams
from baton.block_hash import BlockHasher
from baton.link.words import (
    CancelCommand,
    DecodeCommand,
    KVCacheEvents,
    NodeEvent,
    PrefillCommand,
    RequestDelta,
)
from sim_node.clock import NodeClock
from sim_node.decode import SimDecode
from sim_node.kv_cache import SimKVCache
from sim_node.kv_events import KVEventLog
from sim_node.kv_network import KVNetwork
from sim_node.node_parts import NodeParts
from sim_node.options import SimModel, SimOptions
from sim_node.prefill import SimPrefill
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
    kv_bytes_per_token=1,
    link_bytes_per_s=1000,
    link_latency_s=0.0,
)


class VirtualTimers:
    """Time that passes when it is told to."""

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
        """Let happen all that is due up to a time, and be at that time then."""
        while self._due and self._due[0][0] <= until:
            when, _, callback = heapq.heappop(self._due)
            self.now = max(self.now, when)
            callback()
        self.now = until


class SimPair:
    """A prefill and a decode half that reach each other, and all that they told the router."""

    def __init__(self, *, timing: TimingModel = TIMING, max_model_len: int = 1000, **sizes: Any):
        self.timers = VirtualTimers()
        self.network = KVNetwork()
        self.events: list[tuple[float, str, NodeEvent]] = []  # when, who, what
        self.options = SimOptions(timing=timing, **{"block_size": 4, "num_blocks": 100, **sizes})
        self.model = SimModel(
            identity={"model": "d"}, vocab_size=VOCAB_SIZE, max_model_len=max_model_len
        )
        self.parts = {name: self._make_parts(name) for name in ("p", "d")}
        self.logs = {name: KVEventLog(p.cache, p.emit) for name, p in self.parts.items()}
        self.prefill = SimPrefill(self.parts["p"], self.logs["p"])
        self.decode = SimDecode(self.parts["d"], self.logs["d"])
        self.network.add("p", self.prefill.take_message)
        self.network.add("d", self.decode.take_message)

    def _make_parts(self, name: str) -> NodeParts:
        def emit(event: NodeEvent) -> None:
            self.events.append((self.timers.now, name, event))

        return NodeParts(
            engine_id=name,
            model=self.model,
            options=self.options,
            timing=self.options.timing,
            clock=NodeClock(self.timers),
            cache=SimKVCache(self.options.num_blocks),
            hasher=BlockHasher(self.options.block_size),
            network=self.network,
            emit=emit,
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
        self.prefill.take(
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
        self.decode.take(
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
        for half in (self.decode, self.prefill):
            half.take(CancelCommand(request_id, epoch))

    def deltas(self, request_id: str, who: str = "pd") -> list[tuple[float, RequestDelta]]:
        """What the halves said of a request, and when, in order of the output."""
        found = [
            (when, delta)
            for when, name, event in self.events
            if isinstance(event, tuple) and name in who
            for delta in event
            if delta.output.request_id == request_id
        ]
        return sorted(found, key=lambda item: item[1].output.output_index)

    def tokens(self, request_id: str, who: str = "pd") -> tuple[int, ...]:
        return tuple(t for _, delta in self.deltas(request_id, who) for t in delta.output.token_ids)

    def errors(self, request_id: str) -> list[str]:
        return [delta.error.code for _, delta in self.deltas(request_id) if delta.error is not None]

    def cache_events(self, who: str) -> list[KVCacheEvents]:
        return [e for _, name, e in self.events if name == who and isinstance(e, KVCacheEvents)]

    def check_nothing_is_held(self) -> None:
        for parts in self.parts.values():
            parts.cache.check()
            assert parts.cache.num_free_blocks == parts.cache.num_blocks
