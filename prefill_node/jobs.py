"""Jobs: the open commands of a prefill node, with their times, receipts and spans.

    command -> Job -> encodings and a prefix are expected -> chunks -> receipt, or an end without

The node's loop decides what happens to a job; this table keeps what the job has cost so far, and
what other nodes still send for it. Refuses to know: blocks, steps, decode nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.outputs import PrefillReceipt
from baton.link.words import PrefillCommand
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request
from node_runtime.prefixes.prefix_wait import PrefixWait
from prefill_node.arrivals import PromptWait
from prefill_node.spans import PrefillTraces
from prefill_node.supplies import Supplies


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
            num_cached_tokens=self.request.num_hit_tokens,
            num_encodings_received=self.encodings.num_received if self.encodings else 0,
            num_encodings_lost=self.encodings.num_lost if self.encodings else 0,
            encodings_wait_s=self.encodings.waited_s if self.encodings else 0.0,
            pixels_wait_s=self.request.images.pixels_wait_s if self.request.images else 0.0,
            lost_images=self.encodings.lost_images if self.encodings else (),
            num_images_encoded=self.request.num_images_encoded,
            num_encodings_cached=self.request.num_encodings_cached,
            encoder_s=self.request.encoder_s,
            num_fetched_tokens=self.prefix.num_tokens if self.prefix else 0,
            num_fetches_lost=int(self.prefix.is_lost) if self.prefix else 0,
            fetch_wait_s=self.prefix.waited_s if self.prefix else 0.0,
            num_pinned_tokens=self.request.num_pinned_tokens,
        )


class Jobs:
    """The jobs of one prefill node, by request id. Used on the node's thread.

    Args:
        clock: returns seconds, never going back.
        traces: emits spans of traced requests; None: no tracing.
        supplies: receives encodings and prefixes from other nodes; None: this node receives none.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        traces: PrefillTraces | None = None,
        supplies: Supplies | None = None,
    ) -> None:
        self._clock, self.supplies = clock, supplies or Supplies()
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
        encodings, prefix = self.supplies.expect(request, command, received_at)
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
            self.supplies.cancel(*job.key)

    def fail(self, request_id: str, epoch: int, problem: str) -> Job | None:
        """Forget a request that failed; return its job, or None if it is not open."""
        self.supplies.cancel(request_id, epoch)
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
