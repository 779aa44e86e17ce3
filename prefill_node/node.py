"""PrefillNode: the prefill loop: takes commands, steps the engine, sends KV and token 1.

    command -> Request -> chunks -> full blocks to the sender -> token 1 to the router

One thread calls `step`; commands come in, and events go out, through queues. A decode node
continues the output after token 1, unless token 1 ends the output.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.api.errors import InvalidRequestError, status_name
from baton.api.outputs import FinishReason, PrefillReceipt, RequestDelta
from baton.kv.encodings import holds_encodings
from baton.link.words import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    PrefillCommand,
    RequestView,
    RouterCommand,
    ShareCommand,
)
from baton.telemetry.ledger import Ledger
from engine.core.outputs import SchedulerOutput, StepResult
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import HandoffMetrics, TransferEvent, TransferEventKind
from kvconnector.ends import Sender
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Inbox, Outbox, is_busy
from node_runtime.new_request import new_request
from node_runtime.prefixes.fetches import Fetches, PrefixWait
from node_runtime.reports.operator_views import ids_of, take_ledger, view_request
from prefill_node.arrivals import Arrivals, PromptWait
from prefill_node.options import PushMode
from prefill_node.push_tracker import PushTracker
from prefill_node.spans import PrefillTraces

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A prefill command in progress, with its request.

    Attributes:
        encodings: the encodings that encode nodes send for the prompt; None: they send none.
        prefix: the wait for a cached prefix that another node sends; None: none.
    """

    command: PrefillCommand
    request: Request
    received_at: float
    encodings: PromptWait | None = None
    prefix: PrefixWait | None = None
    started_at: float = 0.0
    num_chunks: int = 0


class PrefillNode:
    """Computes prompts, samples token 1, and sends the prompts' KV to decode nodes.

    Args:
        engine: the engine; only this node steps it.
        sender: sends KV to decode nodes.
        emit: sends events to the router; called on this node's thread.
        push_mode: when blocks are sent.
        clock: returns seconds, never going back.
        traces: emits spans of traced requests; None: no tracing.
        inbox: queue of commands; None: a queue that cannot read the files of adapters.
        arrivals: receives encodings from encode nodes; None: this node encodes all images.
        fetches: cached prefixes that other nodes send; None: this node computes all prompts whole.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        emit: Callable[[NodeEvent], None],
        push_mode: PushMode = PushMode.LAYERS,
        clock: Callable[[], float] = time.monotonic,
        traces: PrefillTraces | None = None,
        inbox: Inbox[PrefillCommand] | None = None,
        arrivals: Arrivals | None = None,
        fetches: Fetches | None = None,
    ) -> None:
        self.engine = engine
        self.arrivals = arrivals
        self.fetches = fetches
        self.sender = sender
        self.push_tracker = PushTracker(engine, sender, push_mode, clock)
        self._clock = clock
        self._traces = PrefillTraces(None, clock) if traces is None else traces
        self._inbox = Inbox(PrefillCommand, engine, clock) if inbox is None else inbox
        self._outbox = Outbox(emit)
        self._jobs: dict[str, _Job] = {}

    def submit(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command for the next step; thread-safe."""
        self._inbox.put(command)

    def step(self) -> bool:
        """Run one round; return whether to run the next round at once."""
        self._inbox.deliver_commands(self, self._outbox)
        if self.arrivals is not None:
            for event in self.arrivals.step():
                self._outbox.report_peer(event)
        if self.fetches is not None:
            for event in self.fetches.step():
                self._outbox.report_peer(event)
        scheduled = self.engine.schedule()
        self._note_starts(scheduled)
        after_layer = self.push_tracker.before_step(scheduled)
        result = self.engine.execute(scheduled, after_layer)
        continued = self._answer(result)
        self._outbox.flush()  # before pushes, as clients wait for token 1
        self.push_tracker.after_step(result.scheduled, continued)
        self._end_failed()
        events = self.sender.poll()
        for event in events:
            self._settle(event)
        self._expire()
        self._outbox.flush()
        return bool(is_busy(self.engine, scheduled, result) or events or self._inbox)

    # ------------------------------------------------------------------ what operators see

    def beat(self) -> NodeBeat:
        """Return this node's load; safe from any thread."""
        requests = list(self.engine.requests.values())
        num_running = sum(request.num_computed_tokens > 0 for request in requests)
        num_held = self._inbox.num_waiting
        return NodeBeat(
            num_waiting=len(requests) - num_running + num_held,
            num_running=num_running,
            num_free_blocks=self.engine.block_pool.num_free,
            num_quarantined_blocks=self.push_tracker.num_draining_blocks + self._num_quarantined,
            num_transfers=(
                self.push_tracker.num_transfers + self._num_arrivals + self._num_fetches
            ),
            adapters=self.engine.adapters.digests,
            num_waiting_for_adapters=num_held,
            adapter_load_s=self._inbox.adapter_load_s,
            num_uncomputed_tokens=sum(
                max(request.num_initial_tokens - request.num_computed_tokens, 0)
                for request in requests
            ),
        )

    @property
    def _num_arrivals(self) -> int:
        return 0 if self.arrivals is None else self.arrivals.num_transfers

    @property
    def _num_fetches(self) -> int:
        return 0 if self.fetches is None else self.fetches.num_transfers

    @property
    def _num_quarantined(self) -> int:
        """Number of blocks that holders of lost prefixes may still write."""
        return 0 if self.fetches is None else self.fetches.quarantine.num_blocks

    def requests(self) -> list[RequestView]:
        """Return all open requests of this node, for operators; safe from any thread."""
        local = [job for job in list(self._jobs.values()) if not job.command.decode_engine_id]
        now = self._clock()
        views = [view_request(job.request, "", now - job.received_at) for job in local]
        return views + self.push_tracker.views()

    def ledger(self) -> Ledger:
        """Return which owners hold which blocks; call between steps, on this node's thread."""
        fetched = [] if self.fetches is None else self.fetches.held()
        return take_ledger(self.engine, [*self.push_tracker.held(), *fetched])

    def handoff_metrics(self) -> HandoffMetrics:
        """Return counts of hand-offs, encodings and prefixes; safe from any thread."""
        metrics = self.push_tracker.metrics()
        if self.arrivals is not None:
            metrics = dataclasses.replace(
                metrics,
                encodings_open=self._num_arrivals,
                encodings_lost=self.arrivals.num_lost_total,
            )
        if self.fetches is not None:
            counts = self.fetches.counts
            metrics = dataclasses.replace(
                metrics,
                num_quarantined_blocks=metrics.num_quarantined_blocks + self._num_quarantined,
                fetches={
                    "expected": counts.started,
                    "received": counts.received,
                    "lost": counts.lost,
                },
                fetches_open=self._num_fetches,
                fetched_tokens=counts.tokens,
                fetched_bytes=counts.num_bytes,
            )
        return metrics

    # ------------------------------------------------------------------ commands

    def cancel_job(self, request_id: str, epoch: int) -> None:
        """End a request, or only its hand-off if token 1 was sent already."""
        job = self._jobs.get(request_id)
        if job is not None and job.command.epoch == epoch:
            self._end(request_id)
        else:
            self.push_tracker.drop(request_id, "", epoch)
            self._traces.end_trace(request_id, epoch, has_pushed=True)

    def abort_jobs(self, abort: AbortAll) -> None:
        """End all requests and hand-offs that an abort message of the router concerns."""
        for request_id in filter(abort.concerns, list(self._jobs)):
            self._end(request_id)
        # Also end hand-offs after token 1: the decode node may belong to another router.
        self.push_tracker.drop_all(abort)

    def connect_peer(self, peer: PeerInfo) -> None:
        """Connect to a decode node or an encode node; raises TransferError if this fails."""
        if not holds_encodings(peer.manifest):
            self.sender.connect(peer)
        elif self.arrivals is not None:
            self.arrivals.add_peer(peer)

    def remove_peer(self, engine_id: str) -> None:
        """Disconnect a departed decode node or encode node."""
        self.sender.disconnect(engine_id)
        if self.arrivals is not None:
            self.arrivals.lose_peer(engine_id)
        if self.fetches is not None:
            self.fetches.lose_peer(engine_id)

    def connect_fetch_peer(self, peer: PeerInfo) -> None:
        """Connect to a node that sends cached prefixes; raises TransferError."""
        if self.fetches is not None:
            self.fetches.add_peer(peer)

    def share_prefix(self, command: ShareCommand, received_at: float) -> None:
        """Ignore a command for decode nodes: prefill nodes send no cached prefixes."""
        logger.warning("this node does not send cached prefixes")

    def start_job(self, command: PrefillCommand, received_at: float) -> None:
        """Queue a prompt in the engine, and track its hand-off if a decode node continues."""
        if command.request_id in self._jobs:
            self._end(command.request_id)
        engine = self.engine
        self._traces.start_trace(command, received_at)
        try:
            request = new_request(engine, command, max_tokens=1)
        except InvalidRequestError as error:
            self._fail(command.request_id, command.epoch, "INVALID_ARGUMENT", str(error))
            return
        encodings = None
        if self.arrivals is not None:
            encodings = self.arrivals.expect(request, command, received_at)
        prefix = None
        if self.fetches is not None:
            prefix = self.fetches.expect(request, command, received_at)
        engine.add_request(request)
        self._jobs[command.request_id] = _Job(command, request, received_at, encodings, prefix)
        logger.debug(
            "has a prompt of %d tokens to compute, for %s",
            request.num_initial_tokens,
            command.decode_engine_id or "nobody else",
            extra=ids_of(command),
        )
        if command.decode_engine_id:
            self.push_tracker.track_request(
                request, command.epoch, command.decode_engine_id, command.timeout_s
            )

    # ------------------------------------------------------------------ results

    def _note_starts(self, scheduled: SchedulerOutput) -> None:
        """Record in traces that chunks are scheduled, and when the first chunk of a request was."""
        for item in scheduled.scheduled:
            job = self._jobs[item.request.request_id]
            job.num_chunks += 1
            job.started_at = job.started_at or self._clock()
            if self._traces and (trace := self._traces.get(*_key(job.command))):
                trace.started_at = job.started_at
                trace.begin_chunk(self._clock())

    def _answer(self, result: StepResult) -> dict[str, RequestDelta]:
        """Queue every token 1 of a step for the router.

        Return the outputs that a decode node continues, by request id.
        """
        continued = {}
        if self._traces:
            self._note_chunks(result.scheduled)
        for output in result.outputs:
            job = self._jobs.pop(output.request_id)
            # The engine ends each request after one token, also if a decode node continues.
            goes_on = job.command.decode_engine_id and not self._ends(job.request, output)
            now = self._clock()
            receipt = PrefillReceipt(
                queue_s=job.started_at - job.received_at,
                prefill_s=now - job.started_at,
                num_chunks=job.num_chunks,
                num_computed_tokens=job.request.num_prompt_tokens_computed,
                num_cached_tokens=job.request.num_cached_tokens,
                num_encodings_received=job.encodings.num_received if job.encodings else 0,
                num_encodings_lost=job.encodings.num_lost if job.encodings else 0,
                encodings_wait_s=job.encodings.waited_s if job.encodings else 0.0,
                num_fetched_tokens=job.prefix.num_tokens if job.prefix else 0,
                num_fetches_lost=int(job.prefix.is_lost) if job.prefix else 0,
                fetch_wait_s=job.prefix.waited_s if job.prefix else 0.0,
            )
            reason = None if goes_on else output.finish_reason
            delta = msgspec.structs.replace(
                output, finish_reason=reason, prefill=receipt, sampled_at=now
            )
            self._outbox.put(delta)
            self._traces.note_computed(job.command, receipt, job.started_at, now)
            if goes_on:
                continued[output.request_id] = delta
            else:
                self.push_tracker.drop(output.request_id, "")
                self._traces.end_trace(*_key(job.command))
            logger.debug(
                "computed its prompt in %.3g s, %d tokens of it were cached",
                receipt.prefill_s,
                receipt.num_cached_tokens,
                extra=ids_of(job.command),
            )
        return continued

    def _note_chunks(self, computed: SchedulerOutput) -> None:
        for item in computed.scheduled:
            job = self._jobs.get(item.request.request_id)
            if job is not None and (trace := self._traces.get(*_key(job.command))):
                trace.end_chunk(self._clock())

    def _end_failed(self) -> None:
        """End the requests that the engine cannot continue, and tell the router."""
        for request_id, error in self.engine.take_failures():
            job = self._jobs.get(request_id)
            if job is not None:
                self.push_tracker.drop(request_id, "refused")
                self._fail(request_id, job.command.epoch, status_name(error), str(error))

    def _ends(self, request: Request, output: RequestDelta) -> bool:
        """Return whether token 1 ends the output, whatever this node's limit of one token."""
        num_left = request.sampling_params.max_tokens - request.num_output_tokens
        full = num_left <= 0 or request.num_tokens >= self.engine.max_model_len
        return output.finish_reason is FinishReason.STOP or full

    def _settle(self, event: TransferEvent) -> None:
        match event.kind:
            case TransferEventKind.PEER_CONNECTED | TransferEventKind.PEER_FAILED:
                self._outbox.report_peer(event)
            case _:
                if not self.push_tracker.settle(event):
                    self._traces.end_trace(event.request_id, event.epoch, has_pushed=True)
                elif not event.reason:  # cancelled by the decode node: the router knows
                    job = self._jobs.get(event.request_id)
                    if job is not None and job.command.epoch == event.epoch:
                        self._end(event.request_id)
                else:
                    self._fail(event.request_id, event.epoch, "UNAVAILABLE", event.reason)

    def _fail(self, request_id: str, epoch: int, code: str, reason: str) -> None:
        # Keep the text of an error about a field of the request, because it is for the client.
        message = reason if code == "INVALID_ARGUMENT" else f"prefill: {reason}"
        self._cancel_waits(request_id, epoch)
        job = self._jobs.pop(request_id, None)
        ids = ids_of(job.command) if job is not None else {"request_id": request_id}
        logger.debug("%s: %s", code, message, extra=ids)
        self._outbox.fail(request_id, epoch, code, message)
        self._traces.end_trace(request_id, epoch, message, has_pushed=True)
        self.engine.abort(request_id)

    def _end(self, request_id: str) -> None:
        """End a request that was cancelled, without telling the router."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._traces.end_trace(*_key(job.command))
            self._cancel_waits(*_key(job.command))
        self.engine.abort(request_id)
        self.push_tracker.drop(request_id, "")

    def _cancel_waits(self, request_id: str, epoch: int) -> None:
        """Expect no encodings and no prefix any more for a request that has ended."""
        if self.arrivals is not None:
            self.arrivals.cancel(request_id, epoch)
        if self.fetches is not None:
            self.fetches.cancel(request_id, epoch)

    def _expire(self) -> None:
        now = self._clock()
        if not self._inbox.is_expiry_due(now):
            return
        self.push_tracker.expire()
        if self._traces:
            self._traces.end_others(self._is_at_work)
        for request_id, job in list(self._jobs.items()):
            if now - job.received_at > job.command.timeout_s:
                self.push_tracker.drop(request_id, "deadline")
                self._fail(request_id, job.command.epoch, "DEADLINE_EXCEEDED", "deadline passed")

    def _is_at_work(self, request_id: str, epoch: int) -> bool:
        job = self._jobs.get(request_id)
        is_computing = job is not None and job.command.epoch == epoch
        return is_computing or self.push_tracker.has(request_id, epoch)


def _key(command: PrefillCommand) -> tuple[str, int]:
    return command.request_id, command.epoch
