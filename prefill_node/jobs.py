"""Jobs: the open commands of a prefill node, with their times, receipts, spans and encodings.

    command -> Job -> encodings and a prefix are expected -> chunks -> receipt, or an end without

The node's loop decides what happens to a job; this table keeps what the job has cost so far, and
what other nodes still send for it. Refuses to know: blocks, steps, decode nodes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.outputs import PrefillReceipt
from baton.kv.encodings import holds_encodings
from baton.link.words import PrefillCommand
from baton.telemetry.ledger import BlockHolding, Ledger
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request
from kvconnector.base import HandoffMetrics, TransferEvent
from kvconnector.peer_info import PeerInfo
from node_runtime.prefixes.fetches import Fetches, PrefixWait
from prefill_node.arrivals import Arrivals, PromptWait
from prefill_node.spans import PrefillTraces


@dataclass(slots=True)
class Job:
    """A prefill command in progress, with its request.

    Attributes:
        encodings: the encodings that encode nodes send for the prompt; None: they send none.
        prefix: the wait for a cached prefix that another node sends; None: no node sends one.
    """

    command: PrefillCommand
    request: Request
    received_at: float
    encodings: PromptWait | None = None
    prefix: PrefixWait | None = None
    started_at: float = 0.0
    num_chunks: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Request id and epoch."""
        return self.command.request_id, self.command.epoch

    def receipt(self, now: float) -> PrefillReceipt:
        """Return the cost of a prompt that is computed now."""
        return PrefillReceipt(
            queue_s=self.started_at - self.received_at,
            prefill_s=now - self.started_at,
            num_chunks=self.num_chunks,
            num_computed_tokens=self.request.num_prompt_tokens_computed,
            num_cached_tokens=self.request.num_cached_tokens,
            num_encodings_received=self.encodings.num_received if self.encodings else 0,
            num_encodings_lost=self.encodings.num_lost if self.encodings else 0,
            encodings_wait_s=self.encodings.waited_s if self.encodings else 0.0,
            lost_images=self.encodings.lost_images if self.encodings else (),
            num_images_encoded=self.request.num_images_encoded,
            num_encodings_cached=self.request.num_encodings_cached,
            encoder_s=self.request.encoder_s,
            num_fetched_tokens=self.prefix.num_tokens if self.prefix else 0,
            num_fetches_lost=int(self.prefix.is_lost) if self.prefix else 0,
            fetch_wait_s=self.prefix.waited_s if self.prefix else 0.0,
        )


class Jobs:
    """The jobs of one prefill node, by request id. Used on the node's thread.

    Args:
        clock: returns seconds, never going back.
        traces: emits spans of traced requests; None: no tracing.
        arrivals: receives encodings from encode nodes; None: this node encodes all images.
        fetches: receives cached prefixes; None: this node computes what it has not cached.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        traces: PrefillTraces | None = None,
        arrivals: Arrivals | None = None,
        fetches: Fetches | None = None,
    ) -> None:
        self._clock, self.arrivals, self.fetches = clock, arrivals, fetches
        self._traces = PrefillTraces(None, clock) if traces is None else traces
        self._jobs: dict[str, Job] = {}

    def open(self) -> list[Job]:
        """Return all open jobs; safe from any thread."""
        return list(self._jobs.values())

    def get(self, request_id: str) -> Job | None:
        """Return the open job of a request, or None."""
        return self._jobs.get(request_id)

    def has(self, request_id: str, epoch: int) -> bool:
        """Return whether this attempt of a request is open."""
        job = self._jobs.get(request_id)
        return job is not None and job.command.epoch == epoch

    def overdue(self, now: float) -> list[Job]:
        """Return the jobs whose deadline has passed."""
        return [job for job in self.open() if now - job.received_at > job.command.timeout_s]

    # ------------------------------------------------------------------ a job's life

    def start_trace(self, command: PrefillCommand, received_at: float) -> None:
        """Start the trace of a command, if it is traced."""
        self._traces.start_trace(command, received_at)

    def new_job(self, command: PrefillCommand, request: Request, received_at: float) -> Job:
        """Return a job whose request waits for the encodings and the prefix that other nodes send.

        Call this before the engine gets the request; `add` the job afterwards.
        """
        encodings = None
        if self.arrivals is not None:
            encodings = self.arrivals.expect(request, command, received_at)
        prefix = None
        if self.fetches is not None:
            prefix = self.fetches.expect(request, command, received_at)
        return Job(command, request, received_at, encodings, prefix)

    def add(self, job: Job) -> None:
        """Add a job whose request the engine has."""
        self._jobs[job.command.request_id] = job

    def note_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Record in traces that chunks are scheduled, and when the first chunk of a request was."""
        for item in scheduled.scheduled:
            job = self._jobs[item.request.request_id]
            job.num_chunks += 1
            job.started_at = job.started_at or self._clock()
            if self._traces and (trace := self._traces.get(*job.key)):
                trace.started_at = job.started_at
                trace.begin_chunk(self._clock())

    def note_computed(self, computed: SchedulerOutput) -> None:
        """Note the end of each chunk of a computed step."""
        if not self._traces:
            return
        for item in computed.scheduled:
            job = self._jobs.get(item.request.request_id)
            if job is not None and (trace := self._traces.get(*job.key)):
                trace.end_chunk(self._clock())

    def finish(self, request_id: str, now: float) -> tuple[Job, PrefillReceipt]:
        """Remove a job whose prompt is computed; return the job and its receipt."""
        job = self._jobs.pop(request_id)
        receipt = job.receipt(now)
        self._traces.note_computed(job.command, receipt, job.started_at, now)
        return job, receipt

    def end(self, request_id: str) -> None:
        """Forget a job that was cancelled, if it is open."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._traces.end_trace(*job.key)
            self._cancel_waits(*job.key)

    def fail(self, request_id: str, epoch: int, problem: str) -> Job | None:
        """Forget a request that failed; return its job, or None if it is not open."""
        self._cancel_waits(request_id, epoch)
        self.end_trace(request_id, epoch, problem)
        return self._jobs.pop(request_id, None)

    def end_unpushed(self, job: Job) -> None:
        """End the trace of a finished job that no decode node continues."""
        self._traces.end_trace(*job.key)

    def end_trace(self, request_id: str, epoch: int, problem: str = "") -> None:
        """End the trace of a request whose KV is sent, or that has failed."""
        self._traces.end_trace(request_id, epoch, problem, has_pushed=True)

    def end_other_traces(self, is_pushing: Callable[[str, int], bool]) -> None:
        """End the traces of requests without an open job or an open hand-off."""
        if self._traces:
            self._traces.end_others(
                lambda request_id, epoch: (
                    self.has(request_id, epoch) or is_pushing(request_id, epoch)
                )
            )

    # ------------------------------------------------------------------ encode nodes

    def poll_encode_nodes(self) -> list[TransferEvent]:
        """Receive encodings; return the events that concern peers."""
        return [] if self.arrivals is None else self.arrivals.step()

    def connect_encode_node(self, peer: PeerInfo) -> bool:
        """Connect a peer if it is an encode node; return whether it is one."""
        is_encode_node = holds_encodings(peer.manifest)
        if is_encode_node and self.arrivals is not None:
            self.arrivals.add_peer(peer)
        return is_encode_node

    def lose_encode_node(self, engine_id: str) -> None:
        """Give up the encodings of a departed peer, if it is an encode node."""
        if self.arrivals is not None:
            self.arrivals.lose_peer(engine_id)

    @property
    def num_encodings(self) -> int:
        """Number of encodings that are to arrive, or that are lost and in quarantine."""
        return 0 if self.arrivals is None else self.arrivals.num_transfers

    @property
    def num_waiting_for_encodings(self) -> int:
        """Number of prompts that wait for encodings; safe from any thread."""
        return 0 if self.arrivals is None else self.arrivals.num_waiting

    def encodings_ledger(self) -> Ledger | None:
        """Return the owners of the memory for encodings; None: this node receives none."""
        return None if self.arrivals is None else self.arrivals.ledger()

    # ------------------------------------------------------------------ holders of prefixes

    def poll_holders(self) -> list[TransferEvent]:
        """Receive cached prefixes; return the events that concern peers."""
        return [] if self.fetches is None else self.fetches.step()

    def connect_holder(self, peer: PeerInfo) -> None:
        """Connect a node that sends cached prefixes."""
        if self.fetches is not None:
            self.fetches.add_peer(peer)

    def lose_holder(self, engine_id: str) -> None:
        """Give up the prefixes of a departed node."""
        if self.fetches is not None:
            self.fetches.lose_peer(engine_id)

    @property
    def num_fetches(self) -> int:
        """Number of prefixes that are to arrive, or that are lost and in quarantine."""
        return 0 if self.fetches is None else self.fetches.num_transfers

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks that holders of lost prefixes may still write."""
        return 0 if self.fetches is None else self.fetches.quarantine.num_blocks

    def held(self) -> list[BlockHolding]:
        """Return the blocks of fetches, for the ledger."""
        return [] if self.fetches is None else self.fetches.held()

    # ------------------------------------------------------------------ metrics

    def add_metrics(self, metrics: HandoffMetrics) -> HandoffMetrics:
        """Return metrics of hand-offs with counts of encodings and prefixes; thread-safe."""
        if self.arrivals is not None:
            metrics = dataclasses.replace(
                metrics,
                encodings_open=self.num_encodings,
                encodings_lost=self.arrivals.num_lost_total,
            )
        if self.fetches is None:
            return metrics
        counts = self.fetches.counts
        return dataclasses.replace(
            metrics,
            num_quarantined_blocks=metrics.num_quarantined_blocks + self.num_quarantined_blocks,
            fetches=counts.by_state(),
            fetches_open=self.num_fetches,
            fetched_tokens=counts.tokens,
            fetched_bytes=counts.num_bytes,
        )

    def _cancel_waits(self, request_id: str, epoch: int) -> None:
        """Expect no encodings and no prefix any more for a request that has ended."""
        if self.arrivals is not None:
            self.arrivals.cancel(request_id, epoch)
        if self.fetches is not None:
            self.fetches.cancel(request_id, epoch)
