"""A real prefill node and a real decode node; a test moves time and network by hand.

Everything runs on the caller's thread: the nodes' steps, the rounds of their KV I/O threads, and
the network between them. Plays the router, too: it places requests and cancels failed ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from baton.api.images import PromptImage, without_files
from baton.api.outputs import DecodeReceipt
from baton.api.sampling_params import SamplingParams
from baton.engine_config import EngineConfig
from baton.link.words import (
    CancelCommand,
    DecodeCommand,
    NodeEvent,
    PeerReport,
    PeerUpdate,
    PrefillCommand,
    RequestDelta,
)
from baton.telemetry.spans import Span, SpanSink, TraceContext, random_id
from decode_node.jobs import DecodeTraces
from decode_node.node import DecodeNode
from decode_node.options import DecodeOptions
from engine.core.outputs import SchedulerOutput
from engine.core.request import RequestStatus
from engine.engine import Engine
from engine.make_engine import make_engine
from kvconnector.base import TransferEvent
from kvconnector.block_digests import BlockDigests
from kvconnector.ends import Receiver, Sender
from kvconnector.protocol.messages import (
    Beat,
    Hello,
    HelloAck,
    SelfTest,
    SelfTestResult,
)
from kvconnector.protocol.seals import peek
from prefill_node.jobs import Jobs
from prefill_node.node import PrefillNode
from prefill_node.options import PushMode
from prefill_node.spans import PrefillTraces
from tests.fakes.engine.dead_engines import let_die
from tests.fakes.handoff.scripted_network import ScriptedMessage, ScriptedNetwork, ScriptedTransport
from tests.fakes.time.virtual_clock import VirtualClock

Key = tuple[str, int]  # (request_id, epoch)
BLOCK_SIZE = 4
# All KV travels, and chunks do not depend on how long steps take.
DECODE_OPTIONS = DecodeOptions(local_prefill_threshold=0, max_step_stretch=0)
ROUND_S = 0.05  # of virtual time, in `settle`
SETTLE_ROUNDS = 50  # 2.5 s: longer than any beat, lease, back-off or repeated Cancel


class RecordingSender(Sender):
    """Records which transfers were started, and which events the node received."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started: list[Key] = []
        self.heard: list[TransferEvent] = []

    def start(self, request_id: str, epoch: int, *arguments: Any, **options: Any) -> None:
        self.started.append((request_id, epoch))
        super().start(request_id, epoch, *arguments, **options)

    def poll(self) -> list[TransferEvent]:
        events = super().poll()
        self.heard += events
        return events


class RecordingReceiver(Receiver):
    """Records the events that the node received."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard: list[TransferEvent] = []

    def poll(self) -> list[TransferEvent]:
        events = super().poll()
        self.heard += events
        return events


class CheckedEngine(Engine):
    """Compares a committed prompt's KV with the right one before the request runs on it; and no
    parked request runs."""

    num_commits = 0

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        expected_kv: Callable[[list[int]], torch.Tensor],
        identity: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        made = make_engine(folder, config, identity)
        super().__init__(made.executor, made._scheduler, made.features, made.compatibility)
        self.expected_kv = expected_kv

    def schedule(self) -> SchedulerOutput:
        scheduled = super().schedule()
        assert all(i.request.status is RequestStatus.RUNNING for i in scheduled.scheduled)
        return scheduled

    def commit(self, request_id: str, token_id: int, drafts: Sequence[int] = ()) -> None:
        request = self.requests[request_id]
        prompt = request.token_ids[: request.num_initial_tokens]
        found = kv_of(self, request.block_ids, len(prompt))
        expected = self.expected_kv(prompt)
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-4, atol=1e-4)
        self.num_commits += 1
        super().commit(request_id, token_id, drafts)


def kv_of(engine: Engine, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """Return the KV that a token behind the first ``num_tokens`` reads: ``[num_blocks, ...]``."""
    num_groups = engine.kv_memory.spec.num_groups
    places = engine.kv_cache_manager.handoff_places(num_tokens)
    kv = engine.kv_memory.tensor[[block_ids[place] for place in places]]  # a copy
    if engine.kv_memory.spec.by_heads:
        kv = kv[:, 0].permute(0, 2, 3, 1, 4, 5).contiguous()  # as if it lay by layers
    if engine.kv_memory.layers_per_group > engine.model_config.num_layers:
        # The last position of a drafter's KV depends on the token after the prompt.
        kv = kv[:, : engine.model_config.num_layers]
    for block, place in zip(kv, places, strict=True):
        num_written = min(num_tokens - place // num_groups * BLOCK_SIZE, BLOCK_SIZE)
        block[..., num_written:, :] = 0  # whatever is there, nobody looks at it
    return kv


@dataclass(slots=True)
class Attempt:
    """One try of a request, as its router sees it."""

    prompt: list[int]
    params: SamplingParams
    tokens: dict[int, int] = field(default_factory=dict)  # by output index
    num_tokens: int | None = None  # set with the finish reason
    error: str = ""
    error_code: str = ""
    num_initial: int = 0
    is_open: bool = True
    trace: TraceContext | None = None
    p_id: str = ""  # whose part of it is the prompt; empty: nobody's

    @property
    def is_complete(self) -> bool:
        return self.num_tokens is not None and len(self.tokens) == self.num_tokens


class Cluster:
    """One prefill node "p", one decode node "d", a network, and their router's part.

    Args:
        folder: folder of a tiny checkpoint.
        expected_kv: the KV of a prompt, by an engine that shares nothing with these.
        num_blocks: blocks of each node and KV cache group; few, so that memory is short.
        async_scheduling: option of both nodes.
        push_mode: option of the prefill node.
        kv_digests: whether what arrives is checked.
        options, preemption: options of the decode node.
        engine_options: further options of both nodes' engines.

    Attributes:
        p_id: the prefill node's engine id; a restarted one has another.
        spans: trace spans of both nodes; every attempt is traced.
    """

    def __init__(
        self,
        folder: Path,
        expected_kv: Callable[[list[int]], torch.Tensor],
        num_blocks: int,
        num_groups: int = 1,
        *,
        async_scheduling: bool = False,
        push_mode: PushMode = PushMode.LAYERS,
        kv_digests: bool = False,
        options: DecodeOptions = DECODE_OPTIONS,
        preemption: str = "recompute",
        engine_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.network = ScriptedNetwork()
        self.may_be_short = options.local_prefill_threshold > 0
        self.attempts: dict[Key, Attempt] = {}
        self.reports: list[PeerReport] = []
        self.receipts: dict[str, DecodeReceipt] = {}
        self.dead: set[str] = set()
        self.stopped: set[str] = set()  # processes that stand still, and may go on
        self.clock = VirtualClock()
        self.spans: list[Span] = []
        self._push_mode = push_mode
        self._kv_digests = kv_digests
        self._folder = folder
        self._config = config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks * num_groups,
            max_num_requests=4,
            max_num_batched_tokens=12,
            long_prefill_token_threshold=5,
            async_scheduling=async_scheduling,
            **engine_options,
        )
        self._start_prefill_node("p")
        d_config = dataclasses.replace(config, preemption=preemption)
        self.d_engine = CheckedEngine(folder, d_config, expected_kv)
        self.d = make_decode_node(
            "d",
            self.d_engine,
            self.network,
            self._take,
            self.clock,
            options,
            kv_digests=kv_digests,
            spans=self._take_spans,
        )
        self.receiver = receiver_of(self.d)
        self.rejoin()
        self.settle()
        assert [report.connected for report in self.reports] == [True, True]

    def _start_prefill_node(self, engine_id: str) -> None:
        self.p_id = engine_id
        self.p = make_prefill_node(
            engine_id,
            make_engine(self._folder, self._config),
            self.network,
            self._take,
            self.clock,
            self._push_mode,
            kv_digests=self._kv_digests,
            spans=self._take_spans,
        )
        self.sender = sender_of(self.p)

    # ------------------------------------------------------------------ the router's part

    def place(
        self,
        request_id: str,
        epoch: int,
        prompt: list[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
        *,
        alone: bool = False,
        images: Sequence[PromptImage] = (),
        encode_engine_id: str = "",
    ) -> None:
        """Send both legs of a new attempt, which continues the output of earlier attempts.

        Args:
            alone: the decode node computes the prompt itself; there is no other leg.
            images: the prompt's images; the node that computes the prompt gets their files.
            encode_engine_id: node that sends the encodings to the prefill node; empty: none.
        """
        outputs, trace = tuple(output_token_ids), TraceContext(random_id(16)).child()
        self.attempts[request_id, epoch] = Attempt(prompt, params, dict(enumerate(outputs)))
        self.attempts[request_id, epoch].num_initial = len(outputs)
        self.attempts[request_id, epoch].trace = trace
        self.attempts[request_id, epoch].p_id = "" if alone else self.p_id
        self.d.submit(
            DecodeCommand(
                request_id=request_id,
                epoch=epoch,
                prompt_token_ids=prompt,
                sampling_params=params,
                output_token_ids=outputs,
                prefill_engine_id="" if alone else self.p_id,
                timeout_s=1e6,
                trace=trace,
                images=tuple(images) if alone else without_files(images),
            )
        )
        if alone:
            return
        self.p.submit(
            PrefillCommand(
                request_id=request_id,
                epoch=epoch,
                prompt_token_ids=prompt,
                sampling_params=params,
                output_token_ids=outputs,
                decode_engine_id="d",
                timeout_s=1e6,
                trace=trace,
                images=tuple(images),
                encode_engine_ids=(encode_engine_id,) * len(images) if encode_engine_id else (),
            )
        )

    def cancel(self, key: Key, *, on_p: bool = True, on_d: bool = True) -> None:
        self.attempts[key].is_open = False
        if on_p:
            self.p.submit(CancelCommand(*key))
        if on_d:
            self.d.submit(CancelCommand(*key))

    def rejoin(self) -> None:
        """Introduce both nodes to each other."""
        self.d.submit(PeerUpdate(self.p_id, self.sender.describe()))
        self.p.submit(PeerUpdate("d", self.d.receiver.describe()))

    def kill(self, engine_id: str, *, told: bool = True) -> None:
        """End one node's process; ``p`` is the current prefill node.

        Args:
            told: the router tells the other node.
        """
        if engine_id == "p":
            engine_id = self.p_id
        self.dead.add(engine_id)
        self.network.kill(engine_id)
        let_die((self.d if engine_id == "d" else self.p).engine)
        survivor = self.p if engine_id == "d" else self.d
        if told:
            survivor.submit(PeerUpdate(engine_id, removed=True))

    @property
    def is_down(self) -> bool:
        """Return whether one of the two nodes is dead."""
        return "d" in self.dead or self.p_id in self.dead

    def restart_prefill_node(self) -> None:
        """Replace the dead process by a new one without any state."""
        assert self.p_id in self.dead
        self._start_prefill_node(f"p{len(self.dead)}")
        self.rejoin()

    def _take_spans(self, spans: Sequence[Span], zero_ns: int) -> None:
        self.spans += spans

    def check_spans(self) -> None:
        """Check that each living node reported each attempt once, and that no span is open."""
        ids = {span.context.span_id for span in self.spans}
        assert len(ids) == len(self.spans)
        attempts = {attempt.trace.span_id for attempt in self.attempts.values() if attempt.trace}
        for span in self.spans:
            assert span.parent_id in ids | attempts
            assert span.end_s >= span.begin_s
        roots = Counter((span.name, span.parent_id) for span in self.spans)
        for attempt in self.attempts.values():
            assert attempt.trace is not None
            of_p = roots["prefill", attempt.trace.span_id]
            of_d = roots["decode", attempt.trace.span_id]
            assert of_p == 1 if attempt.p_id == self.p_id not in self.dead else of_p <= 1
            assert of_d == 1 if "d" not in self.dead else of_d <= 1

    def _take(self, event: NodeEvent) -> None:
        if isinstance(event, PeerReport):
            self.reports.append(event)
        elif isinstance(event, tuple):
            for delta in event:
                self._take_delta(delta)

    def _take_delta(self, delta: RequestDelta) -> None:
        key = (delta.request_id, delta.epoch)
        attempt = self.attempts[key]
        if not attempt.is_open:
            return
        if delta.decode is not None:
            self.receipts[delta.request_id] = delta.decode
        if delta.error is not None:
            attempt.error = delta.error.message
            attempt.error_code = delta.error.code
            self.cancel(key)
            return
        for offset, token_id in enumerate(delta.token_ids):
            index = delta.output_index + offset
            # Only token 1 that both nodes computed, after a short-cut, may come twice.
            may_come_twice = index == attempt.num_initial and self.may_be_short
            assert index not in attempt.tokens or may_come_twice, "an index twice"
            assert attempt.tokens.setdefault(index, token_id) == token_id
        if delta.finish_reason is not None:
            attempt.num_tokens = delta.output_index + len(delta.token_ids)
        if attempt.is_complete:
            attempt.is_open = False
            if attempt.num_tokens == 1:  # it ended on the prefill node
                self.cancel(key)

    # ------------------------------------------------------------------ time

    def step(self, engine_id: str) -> None:
        """Run one step of a node's engine thread."""
        if self._is_dead(engine_id) or engine_id in self.stopped:
            return
        node = self.p if engine_id == "p" else self.d
        node.step()
        node.engine.check()

    def round(self, engine_id: str) -> None:
        """Run one round of a node's KV I/O thread."""
        if not self._is_dead(engine_id) and engine_id not in self.stopped:
            (self.sender if engine_id == "p" else self.receiver).loop.round()

    def _is_dead(self, role: str) -> bool:
        return (self.p_id if role == "p" else role) in self.dead

    def settle(self) -> None:
        """Run everything without faults until only heartbeats happen for a while."""
        self.stopped.clear()
        quiet = 0
        for _ in range(4000):
            for engine_id in "dp":
                self.round(engine_id)
                self.step(engine_id)
            busy = bool(self.network.writes) or not all(map(is_beat, self.network.messages))
            while self.network.messages:
                self.network.deliver(0)
            while self.network.writes:
                self.network.land(0)
            steps = self.p.engine.num_steps + self.d.engine.num_steps
            quiet = 0 if busy or steps != self._last_steps else quiet + 1
            self._last_steps = steps
            if quiet > SETTLE_ROUNDS:
                return
            self.clock.advance(ROUND_S)
        raise AssertionError("it never becomes quiet")

    _last_steps = -1


def is_beat(message: ScriptedMessage) -> bool:
    """Return whether a message is a heartbeat, which concerns no request."""
    about_peers = Beat | Hello | HelloAck | SelfTest | SelfTestResult
    return isinstance(peek(message.payload), about_peers)


def _never(error: Exception) -> None:
    raise AssertionError("no thread runs that could die") from error


def end_of(node: PrefillNode | DecodeNode) -> RecordingSender | RecordingReceiver:
    """Return a node's end of the connector."""
    return sender_of(node) if isinstance(node, PrefillNode) else receiver_of(node)


def sender_of(node: PrefillNode) -> RecordingSender:
    assert isinstance(node.sender, RecordingSender)
    return node.sender


def receiver_of(node: DecodeNode) -> RecordingReceiver:
    assert isinstance(node.receiver, RecordingReceiver)
    return node.receiver


def make_prefill_node(
    engine_id: str,
    engine: Engine,
    network: ScriptedNetwork,
    emit: Callable[[NodeEvent], None],
    clock: VirtualClock,
    push_mode: PushMode,
    *,
    kv_digests: bool,
    spans: SpanSink | None = None,
) -> PrefillNode:
    """A node without threads; see `Cluster` for the arguments."""
    transport = ScriptedTransport(engine_id, engine.kv_memory, network)
    digests = BlockDigests(engine.kv_memory) if kv_digests else None
    sender = RecordingSender(transport, lambda: None, _never, clock, digests)
    transport.channels = sender.loop.channels
    jobs = Jobs(clock, PrefillTraces(spans, clock))
    return PrefillNode(engine, sender, emit, push_mode, clock=clock, jobs=jobs)


def make_decode_node(
    engine_id: str,
    engine: Engine,
    network: ScriptedNetwork,
    emit: Callable[[NodeEvent], None],
    clock: VirtualClock,
    options: DecodeOptions,
    *,
    kv_digests: bool,
    spans: SpanSink | None = None,
) -> DecodeNode:
    """A node without threads; see `Cluster` for the arguments."""
    transport = ScriptedTransport(engine_id, engine.kv_memory, network)
    digests = BlockDigests(engine.kv_memory) if kv_digests else None
    receiver = RecordingReceiver(transport, lambda: None, _never, clock, digests)
    transport.channels = receiver.loop.channels
    return DecodeNode(engine, receiver, emit, options, clock, DecodeTraces(spans, clock))
