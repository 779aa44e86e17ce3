"""DecodeNode: the decode loop: takes commands and KV, steps the engine, sends tokens.

    command -> parked Request -> grant -> (blocks arrive) -> commit -> tokens to the router

One thread calls `step`; commands come in, and events go out, through queues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from baton.api.errors import BatonError, InvalidRequestError, status_name
from baton.api.outputs import DecodeReceipt
from baton.link.words import (
    AbortAll,
    DecodeCommand,
    NodeBeat,
    NodeEvent,
    RequestView,
    RouterCommand,
)
from baton.telemetry.ledger import Ledger
from decode_node.jobs import DecodeTraces, Job
from decode_node.options import DecodeOptions
from decode_node.reservations import Reservation, Reservations, ReservationState
from engine.core.outputs import StepResult
from engine.core.request import Request, RequestStatus
from engine.engine import Engine
from kvconnector.base import HandoffMetrics, TransferEvent, TransferEventKind
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Inbox, Outbox, SideWork, is_busy
from node_runtime.new_request import new_request
from node_runtime.reports.operator_views import (
    describe_load,
    ids_of,
    take_ledger,
    view_request,
)

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS = DecodeOptions()


class DecodeNode:
    """Receives the KV of prompts, and decodes their outputs from token 2 on.

    Args:
        engine: the engine; only this node steps it.
        receiver: receives KV from prefill nodes.
        emit: sends events to the router; called on this node's thread.
        options: options of decode nodes.
        clock: returns seconds, never going back.
        traces: emits spans of traced requests; None: no tracing.
        inbox: queue of commands; None: a queue that cannot read the files of adapters.
        side_work: gets and sends cached prefixes; None: this node exchanges none.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        emit: Callable[[NodeEvent], None],
        options: DecodeOptions = DEFAULT_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
        traces: DecodeTraces | None = None,
        inbox: Inbox[DecodeCommand] | None = None,
        side_work: SideWork | None = None,
    ) -> None:
        self.engine = engine
        self.side_work = side_work or SideWork()
        self.receiver = receiver
        self.reservations = Reservations(engine, receiver, options, clock)
        self._clock = clock
        self._traces = traces or DecodeTraces(None, clock)
        self._options = options
        self._inbox = Inbox(DecodeCommand, engine, clock) if inbox is None else inbox
        self._outbox = Outbox(emit)
        self._jobs: dict[str, Job] = {}
        self._prefill_nodes = set[str]()  # engine ids of connected prefill nodes

    def submit(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command for the next step; thread-safe."""
        self._inbox.put(command)

    def step(self) -> bool:
        """Run one round; return whether to run the next round at once."""
        self._inbox.deliver_commands(self, self._outbox)
        for event in self.receiver.poll():
            self._settle(event)
        self.side_work.step(self._outbox)
        self.reservations.grant_waiting()
        scheduled = self.engine.schedule()
        result = self.engine.execute(scheduled)
        self._answer(result)
        self._end_failed()
        self._end_handed_back()
        self._expire()
        self.reservations.tick()
        self.reservations.grant_waiting()  # last, to use blocks that this step freed
        self.receiver.expect(self.reservations.has_open)
        self._outbox.flush()
        return bool(is_busy(self.engine, scheduled, result) or self._inbox)

    # ------------------------------------------------------------------ what operators see

    def beat(self) -> NodeBeat:
        """Return this node's load; safe from any thread."""
        requests = list(self.engine.requests.values())
        reservations, side_work = self.reservations, self.side_work
        return describe_load(
            self.engine,
            self._inbox,
            requests,
            num_running=sum(request.status is RequestStatus.RUNNING for request in requests),
            num_quarantined_blocks=reservations.quarantine.num_blocks
            + side_work.num_quarantined_blocks,
            num_transfers=reservations.num_transfers + side_work.num_transfers,
            handoffs=self.handoff_metrics(),
        )

    def requests(self) -> list[RequestView]:
        """Return all open requests of this node, for operators; safe from any thread."""
        now = self._clock()
        return [
            view_request(job.request, job.reservation.state.value, now - job.reservation.parked_at)
            for job in list(self._jobs.values())
        ]

    def ledger(self) -> Ledger:
        """Return which owners hold which blocks; call between steps, on this node's thread."""
        return take_ledger(self.engine, [*self.reservations.held(), *self.side_work.held()])

    def handoff_metrics(self) -> HandoffMetrics:
        """Return counts of hand-offs and sent prefixes; safe from any thread."""
        return self.side_work.add_metrics(self.reservations.metrics())

    # ------------------------------------------------------------------ commands

    def cancel_job(self, request_id: str, epoch: int) -> None:
        """End an attempt of a request, if this attempt is open."""
        self.side_work.cancel(request_id, epoch)  # in case the command still waits for its adapter
        job = self._jobs.get(request_id)
        if job is not None and job.command.epoch == epoch:
            self._end(request_id)

    def abort_jobs(self, abort: AbortAll) -> None:
        """End all requests that an abort message of the router concerns."""
        for request_id in filter(abort.concerns, list(self._jobs)):
            self._end(request_id)

    def connect_peer(self, peer: PeerInfo) -> None:
        """Connect to a prefill node; raises TransferError if that is impossible."""
        self.reservations.add_peer(peer)

    def remove_peer(self, engine_id: str) -> None:
        """Fail the requests whose KV a departed prefill node was to send."""
        self.note_prefill_node(engine_id, is_connected=False)
        for reservation in self.reservations.lose_peer(engine_id):
            self._fail(reservation, "UNAVAILABLE", "its prefill node is gone")

    def start_job(self, command: DecodeCommand, received_at: float) -> None:
        """Park a request until its KV arrives, or queue it so that its prompt is computed here."""
        if command.request_id in self._jobs:
            self._end(command.request_id)
        engine = self.engine
        try:
            request = new_request(engine, command)
        except InvalidRequestError as error:
            self._refuse(command, error)
            self._traces.end_trace(command, received_at, error=str(error))
            return
        prefix = None
        computes_prompt = not command.prefill_engine_id or self._is_short(request)
        if computes_prompt:
            prefix = self.side_work.expect_prefix(request, command, received_at)
            engine.add_request(request)
        reserve = self.reservations.skip_handoff if computes_prompt else self.reservations.park
        reservation = reserve(request, command.epoch, command.prefill_engine_id, received_at)
        self._jobs[command.request_id] = Job(command, request, reservation, prefix)
        logger.debug(
            "accepted; %s computes the prompt of %d tokens",
            "this node" if computes_prompt else command.prefill_engine_id,
            request.num_initial_tokens,
            extra=ids_of(command),
        )

    def _is_short(self, request: Request) -> bool:
        """Return whether this node computes a prompt at once, because most of it is cached."""
        if not self._options.local_prefill_threshold:
            return False
        num_cached = self.engine.kv_cache_manager.num_usable_cached_tokens(request)
        if not request.can_compute_from(num_cached):
            return False
        num_missing = request.num_initial_tokens - num_cached
        is_short = num_missing <= self._options.local_prefill_threshold
        # If this node caches nothing of a short prompt, a prefill node computes the prompt.
        return is_short and num_cached > 0 and self.engine.can_begin(request)

    def _refuse(self, command: DecodeCommand, error: BatonError) -> None:
        self._outbox.fail(command.request_id, command.epoch, status_name(error), str(error))

    def note_prefill_node(self, engine_id: str, *, is_connected: bool) -> None:
        """Record that a prefill node is connected or gone; call on this node's thread.

        While any prefill node is connected, ``max_step_stretch`` limits how much prompts may slow
        decode steps.
        """
        had_any = bool(self._prefill_nodes)
        (self._prefill_nodes.add if is_connected else self._prefill_nodes.discard)(engine_id)
        limit, has_any = self._options.max_step_stretch, bool(self._prefill_nodes)
        if limit and has_any != had_any:
            self.engine.figures.limit_stretch(limit if has_any else None)

    # ------------------------------------------------------------------ results

    def _settle(self, event: TransferEvent) -> None:
        if event.kind is TransferEventKind.PEER_CONNECTED:
            self.note_prefill_node(event.engine_id, is_connected=True)
            self._outbox.report_peer(event)
        elif event.kind is TransferEventKind.PEER_FAILED:
            self.note_prefill_node(event.engine_id, is_connected=False)
            self._outbox.report_peer(event)
            for lost in self.reservations.end_all_of(event.engine_id):
                self._fail(lost, "UNAVAILABLE", "its prefill node cannot be reached")
        elif event.kind is TransferEventKind.PEER_DRAINED:
            self.reservations.quarantine.end_drained(event.engine_id)
        else:
            reservation = self.reservations.settle(event)
            if reservation is None or reservation.state is not ReservationState.QUARANTINED:
                return
            if event.kind is TransferEventKind.COMMITTED:
                self._fail(reservation, "UNAVAILABLE", "the commit record does not fit")
            elif event.reason:
                self._fail(reservation, "UNAVAILABLE", f"KV did not arrive: {event.reason}")
            else:  # the request ended on the prefill node: the router knows
                self._drop_job(event.request_id)

    def _answer(self, result: StepResult) -> None:
        """Queue a step's new tokens for the router, with the receipts of finished requests."""
        now = self._clock()
        for output in result.outputs:
            job = self._jobs[output.request_id]
            if not job.steps_until_first:
                job.first_step_s = now - job.reservation.committed_at
                job.steps_until_first = self.engine.num_steps - job.reservation.committed_at_step
            if output.finish_reason is not None:
                receipt = job.receipt(self.engine.features.why_drafts(job.request))
                self._drop_job(output.request_id, receipt=receipt)
                logger.debug(
                    "ended (%s) after %d tokens",
                    output.finish_reason.value,
                    job.request.num_output_tokens,
                    extra=ids_of(job.command),
                )
                output = msgspec.structs.replace(output, decode=receipt)
            self._outbox.put(output)

    def _end_failed(self) -> None:
        """End the requests that the engine cannot continue, and tell the router."""
        for request_id, error in self.engine.take_failures():
            job = self._jobs.get(request_id)
            if job is not None:
                self._end(request_id, str(error))
                self._refuse(job.command, error)

    def _end_handed_back(self) -> None:
        """End preempted requests for the router to send to nodes again."""
        for request in self.engine.take_handed_back():
            job = self._jobs[request.request_id]
            self._fail(job.reservation, "PREEMPTED", "preempted: other requests need its memory")

    def _fail(self, reservation: Reservation, code: str, reason: str) -> None:
        request_id = reservation.request.request_id
        job = self._drop_job(request_id, reason)
        ids = ids_of(job.command) if job is not None else {"request_id": request_id}
        logger.debug("%s: %s", code, reason, extra=ids)
        self._outbox.fail(request_id, reservation.epoch, code, f"decode: {reason}")

    def _drop_job(
        self, request_id: str, error: str = "", receipt: DecodeReceipt | None = None
    ) -> Job | None:
        """Remove a job, if it exists, and emit its trace."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            reservation = job.reservation
            is_committed = reservation.state is ReservationState.COMMITTED
            self._traces.end_trace(
                job.command,
                reservation.parked_at,
                committed_at=reservation.committed_at if is_committed else 0.0,
                first_step_s=job.first_step_s,
                receipt=receipt,
                error=error,
            )
        return job

    def _end(self, request_id: str, error: str = "") -> None:
        """End a request that was cancelled, failed, or exceeded its deadline."""
        job = self._drop_job(request_id, error)
        if job is None:
            return
        self.reservations.cancel(request_id, job.command.epoch)
        self.side_work.cancel(request_id, job.command.epoch)
        self.engine.abort(request_id)

    def _expire(self) -> None:
        now = self._clock()
        if not self._inbox.is_expiry_due(now):
            return
        for job in list(self._jobs.values()):
            if now - job.reservation.parked_at > job.command.timeout_s:
                self._end(job.command.request_id, "deadline passed")
                self._fail(job.reservation, "DEADLINE_EXCEEDED", "deadline passed")
