"""PrefillNode: the prefill loop: takes commands, steps the engine, sends KV and token 1.

    command -> Request -> chunks -> full blocks to the sender -> token 1 to the router

One thread calls `step`; commands come in, and events go out, through queues. A decode node
continues the output after token 1, unless token 1 ends the output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from baton.api.errors import InvalidRequestError, status_name
from baton.api.outputs import FinishReason, RequestDelta
from baton.link.words import (
    AbortAll,
    NodeBeat,
    NodeEvent,
    PrefillCommand,
    RequestView,
    RouterCommand,
)
from baton.telemetry.ledger import Ledger
from engine.core.outputs import StepResult
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import HandoffMetrics, TransferEvent, TransferEventKind
from kvconnector.ends import Sender
from kvconnector.peer_info import PeerInfo
from node_runtime.inbox import Inbox, Outbox, is_busy
from node_runtime.new_request import new_request
from node_runtime.reports.operator_views import (
    describe_load,
    ids_of,
    take_ledger,
    view_request,
)
from prefill_node.jobs import Jobs
from prefill_node.options import PushMode
from prefill_node.push_tracker import PushTracker

logger = logging.getLogger(__name__)


class PrefillNode:
    """Computes prompts, samples token 1, and sends the prompts' KV to decode nodes.

    Args:
        engine: the engine; only this node steps it.
        sender: sends KV to decode nodes.
        emit: sends events to the router; called on this node's thread.
        push_mode: when blocks are sent.
        clock: returns seconds, never going back.
        inbox: queue of commands; None: a queue that cannot read the files of adapters.
        jobs: table of open commands; None: without tracing, and without encode nodes.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        emit: Callable[[NodeEvent], None],
        push_mode: PushMode = PushMode.LAYERS,
        clock: Callable[[], float] = time.monotonic,
        inbox: Inbox[PrefillCommand] | None = None,
        jobs: Jobs | None = None,
    ) -> None:
        self.engine = engine
        self.jobs = jobs or Jobs(clock)
        self.side_work = self.jobs.supplies
        self.sender = sender
        self.push_tracker = PushTracker(engine, sender, push_mode, clock)
        self._clock = clock
        self._inbox = Inbox(PrefillCommand, engine, clock) if inbox is None else inbox
        self._outbox = Outbox(emit)

    def submit(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command for the next step; thread-safe."""
        self._inbox.put(command)

    def step(self) -> bool:
        """Run one round; return whether to run the next round at once."""
        self._inbox.deliver_commands(self, self._outbox)
        self.side_work.step(self._outbox)
        scheduled = self.engine.schedule()
        self.jobs.note_scheduled(scheduled)
        after_layer = self.push_tracker.before_step(scheduled)
        result = self.engine.execute(scheduled, after_layer)
        continued = self._answer(result)
        self._outbox.flush()  # before the pushes, because clients wait for token 1
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
        tracker, side_work = self.push_tracker, self.side_work
        return describe_load(
            self.engine,
            self._inbox,
            requests,
            num_running=sum(request.num_computed_tokens > 0 for request in requests),
            num_quarantined_blocks=tracker.num_draining_blocks + side_work.num_quarantined_blocks,
            num_transfers=tracker.num_transfers + side_work.num_transfers,
            num_waiting_for_encodings=side_work.num_waiting_for_encodings,
            handoffs=self.handoff_metrics(),
        )

    def requests(self) -> list[RequestView]:
        """Return all open requests of this node, for operators; safe from any thread."""
        local = [job for job in self.jobs.open() if not job.command.decode_engine_id]
        now = self._clock()
        views = [view_request(job.request, "", now - job.received_at) for job in local]
        return views + self.push_tracker.views()

    def ledger(self) -> Ledger:
        """Return which owners hold which blocks; call between steps, on this node's thread."""
        held = [*self.push_tracker.held(), *self.side_work.held()]
        return take_ledger(self.engine, held, self.side_work.encodings_ledger())

    def handoff_metrics(self) -> HandoffMetrics:
        """Return counts of hand-offs, encodings and prefixes; safe from any thread."""
        return self.side_work.add_metrics(self.push_tracker.metrics())

    # ------------------------------------------------------------------ commands

    def cancel_job(self, request_id: str, epoch: int) -> None:
        """End a request, or only its hand-off if token 1 was sent already."""
        if self.jobs.has(request_id, epoch):
            self._end(request_id)
        else:
            self.push_tracker.drop(request_id, "", epoch)
            self.jobs.end_trace(request_id, epoch)
            self.jobs.supplies.cancel(request_id, epoch)  # the command may not have started

    def abort_jobs(self, abort: AbortAll) -> None:
        """End all requests and hand-offs that an abort message of the router concerns."""
        for job in self.jobs.open():
            if abort.concerns(job.command.request_id):
                self._end(job.command.request_id)
        # Also end hand-offs after token 1: the decode node may belong to another router.
        self.push_tracker.drop_all(abort)

    def connect_peer(self, peer: PeerInfo) -> None:
        """Connect to a decode node or an encode node; raises TransferError if this fails."""
        if not self.side_work.add_peer(peer):
            self.sender.connect(peer)

    def remove_peer(self, engine_id: str) -> None:
        """Disconnect a departed decode node."""
        self.sender.disconnect(engine_id)

    def start_job(self, command: PrefillCommand, received_at: float) -> None:
        """Queue a prompt in the engine, and track its hand-off if a decode node continues."""
        if self.jobs.get(command.request_id) is not None:
            self._end(command.request_id)
        engine = self.engine
        self.jobs.start_trace(command, received_at)
        try:
            request = new_request(engine, command, max_tokens=1)
        except InvalidRequestError as error:
            self._fail(command.request_id, command.epoch, "INVALID_ARGUMENT", str(error))
            return
        job = self.jobs.new_job(command, request, received_at)
        engine.add_request(request)
        self.jobs.add(job)
        logger.debug(
            "accepted; this node computes the prompt of %d tokens, and %s",
            request.num_initial_tokens,
            f"{command.decode_engine_id} decodes"
            if command.decode_engine_id
            else "no node decodes",
            extra=ids_of(command),
        )
        if command.decode_engine_id:
            self.push_tracker.track_request(
                request, command.epoch, command.decode_engine_id, command.timeout_s
            )

    # ------------------------------------------------------------------ results

    def _answer(self, result: StepResult) -> dict[str, RequestDelta]:
        """Queue every token 1 of a step for the router.

        Return the outputs that a decode node continues, by request id.
        """
        continued = {}
        self.jobs.note_computed(result.scheduled)
        for output in result.outputs:
            now = self._clock()
            job, receipt = self.jobs.finish(output.request_id, now)
            # The engine ends each request after one token, also if a decode node continues.
            goes_on = job.command.decode_engine_id and not self._ends(job.request, output)
            reason = None if goes_on else output.finish_reason
            delta = msgspec.structs.replace(
                output, finish_reason=reason, prefill=receipt, sampled_at=now
            )
            self._outbox.put(delta)
            if goes_on:
                continued[output.request_id] = delta
            else:
                self.push_tracker.drop(output.request_id, "")
                self.jobs.end_unpushed(job)
            logger.debug(
                "computed the prompt in %.3g s; %d of its tokens were cached",
                receipt.prefill_s,
                receipt.num_cached_tokens,
                extra=ids_of(job.command),
            )
        return continued

    def _end_failed(self) -> None:
        """End the requests that the engine cannot continue, and tell the router."""
        for request_id, error in self.engine.take_failures():
            job = self.jobs.get(request_id)
            if job is not None:
                self.push_tracker.drop(request_id, "refused")
                self._fail(request_id, job.command.epoch, status_name(error), str(error))

    def _ends(self, request: Request, output: RequestDelta) -> bool:
        """Return whether token 1 ends the output, apart from this node's limit of one token."""
        num_left = request.sampling_params.max_tokens - request.num_output_tokens
        full = num_left <= 0 or request.num_tokens >= self.engine.max_model_len
        return output.finish_reason is FinishReason.STOP or full

    def _settle(self, event: TransferEvent) -> None:
        match event.kind:
            case TransferEventKind.PEER_CONNECTED | TransferEventKind.PEER_FAILED:
                self._outbox.report_peer(event)
            case _:
                if not self.push_tracker.settle(event):
                    self.jobs.end_trace(event.request_id, event.epoch)
                elif not event.reason:  # cancelled by the decode node: the router knows
                    if self.jobs.has(event.request_id, event.epoch):
                        self._end(event.request_id)
                else:
                    self._fail(event.request_id, event.epoch, "UNAVAILABLE", event.reason)

    def _fail(self, request_id: str, epoch: int, code: str, reason: str) -> None:
        # Keep the text of an error about a field of the request, because it is for the client.
        message = reason if code == "INVALID_ARGUMENT" else f"prefill: {reason}"
        job = self.jobs.fail(request_id, epoch, message)
        ids = ids_of(job.command) if job is not None else {"request_id": request_id}
        logger.debug("%s: %s", code, message, extra=ids)
        self._outbox.fail(request_id, epoch, code, message)
        self.engine.abort(request_id)

    def _end(self, request_id: str) -> None:
        """End a cancelled request; send nothing to the router."""
        self.jobs.end(request_id)
        self.engine.abort(request_id)
        self.push_tracker.drop(request_id, "")

    def _expire(self) -> None:
        now = self._clock()
        if not self._inbox.is_expiry_due(now):
            return
        self.push_tracker.expire()
        self.jobs.end_other_traces(self.push_tracker.has)
        for job in self.jobs.overdue(now):
            request_id, epoch = job.key
            self.push_tracker.drop(request_id, "deadline")
            self._fail(request_id, epoch, "DEADLINE_EXCEEDED", "deadline passed")
