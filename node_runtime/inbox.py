"""Inbox and Outbox: the queues between a node's thread and its program, for all kinds of node.

router -> Inbox (-> AdapterQueue) -> a method of the node          on the node's thread
the node's deltas and reports -> Outbox -> router
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.adapters.digest import AdapterMissingError
from baton.api.errors import TransferError
from baton.api.outputs import RequestDelta
from baton.kv.prefixes import fetch_end, share_end
from baton.link.words import (
    ADAPTER_MISSING,
    AbortAll,
    CancelCommand,
    NodeEvent,
    PeerReport,
    PeerUpdate,
    RequestCommand,
    RequestError,
    RouterCommand,
    SessionHint,
    ShareCommand,
    failed_delta,
)
from baton.telemetry.ledger import BlockHolding
from engine.core.outputs import SchedulerOutput, StepResult
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import HandoffMetrics, TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo
from node_runtime.adapters.adapter_queue import AdapterQueue, Failure, JobCommand
from node_runtime.prefixes.hint_queue import HintQueue
from node_runtime.prefixes.prefix_wait import PrefixWait

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.1

Job = TypeVar("Job", bound=JobCommand)
HandledJob = TypeVar("HandledJob", contravariant=True)


class CommandHandler(Protocol[HandledJob]):
    """The part of a node that handles commands, on the node's thread."""

    def start_job(self, command: HandledJob, received_at: float) -> None:
        """Start a prefill or decode command, after ending a running job of the same request."""

    def cancel_job(self, request_id: str, epoch: int) -> None:
        """End an attempt of a request, if this attempt is open."""

    def abort_jobs(self, abort: AbortAll) -> None:
        """End all requests that an abort message concerns."""

    def connect_peer(self, peer: PeerInfo) -> None:
        """Connect to a node of the other role; raises TransferError if this fails."""

    def remove_peer(self, engine_id: str) -> None:
        """Disconnect a departed node of the other role, and handle the requests that need it."""

    @property
    def side_work(self) -> SideWork:
        """The node's transfers of encodings and cached prefixes."""


class SideWork:
    """A node's transfers of encodings and cached prefixes; in this class, no transfers at all.

    Used on the node's thread; properties and `add_metrics` are safe from any thread.
    """

    def add_peer(self, peer: PeerInfo) -> bool:
        """Connect a peer of these transfers; return False for a peer of KV hand-offs.

        Raises TransferError if this fails.
        """
        return False

    def lose_peer(self, engine_id: str) -> None:
        """End the transfers of a departed node."""

    def expect_prefix(
        self, request: Request, command: RequestCommand, received_at: float
    ) -> PrefixWait | None:
        """Let a new request wait for a cached prefix; return None if no node sends one.

        Call this before the engine gets the request.
        """
        return None

    def cancel(self, request_id: str, epoch: int) -> None:
        """Stop waiting for a prefix for a request that has ended."""

    def share_prefix(self, command: ShareCommand, received_at: float) -> None:
        """Send a cached prefix to another node."""
        logger.warning("this node does not send cached prefixes")

    def abort(self, abort: AbortAll) -> None:
        """Stop sending the prefixes that an abort message concerns."""

    def step(self, outbox: Outbox) -> None:
        """Continue the transfers; report peers that have connected or failed."""

    @property
    def num_transfers(self) -> int:
        """Number of open transfers, and of those in quarantine."""
        return 0

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of KV blocks that other nodes may still write after a transfer's end."""
        return 0

    def held(self) -> list[BlockHolding]:
        """Return the KV blocks that the transfers hold, for the ledger."""
        return []

    def add_metrics(self, metrics: HandoffMetrics) -> HandoffMetrics:
        """Return metrics of hand-offs with counts of these transfers."""
        return metrics


class Inbox(Generic[Job]):
    """The commands for one node, and when the node must next look for expired requests.

    Args:
        job: class of the commands with requests that this node's role executes.
        engine: computes with the adapters.
        clock: returns seconds, never going back.
        adapters: holds commands until their adapters are in memory; None: a queue that reads no
            files.
    """

    def __init__(
        self,
        job: type[Job],
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterQueue | None = None,
    ) -> None:
        self._job, self._adapters = job, adapters or AdapterQueue(engine, clock=clock)
        self._engine = engine
        self._hints = HintQueue(engine.features.hint_session, clock)
        self._clock = clock
        # Queued commands, each with the time of its arrival.
        self._commands: deque[tuple[float, RouterCommand | AbortAll]] = deque()
        self._expire_at = 0.0

    def put(self, command: RouterCommand | AbortAll) -> None:
        """Queue a command for the next step; thread-safe."""
        self._commands.append((self._clock(), command))

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def num_waiting(self) -> int:
        """Return the number of commands that wait for adapters; safe from any thread."""
        return self._adapters.num_waiting

    @property
    def adapter_load_s(self) -> float:
        """Return the seconds that it took lately to read and load an adapter; 0: unknown."""
        return self._adapters.load_s

    def deliver_commands(self, node: CommandHandler[Job], outbox: Outbox) -> None:
        """Call the method of the node that handles each queued command, in order of arrival."""
        while self._commands:
            received_at, command = self._commands.popleft()
            if isinstance(command, self._job):
                self._start(node, outbox, command, received_at)
                continue
            match command:
                case CancelCommand():
                    self._adapters.cancel(command.request_id, command.epoch)
                    node.cancel_job(command.request_id, command.epoch)
                case PeerUpdate(removed=True):
                    node.remove_peer(command.engine_id)
                    node.side_work.lose_peer(command.engine_id)
                case PeerUpdate(engine_id=engine_id):
                    fetches, shares = command.fetch_peer_info, command.share_peer_info
                    if command.peer_info or not (fetches or shares):
                        _connect(node.connect_peer, engine_id, command.peer_info, outbox)
                    for end, info in ((fetch_end, fetches), (share_end, shares)):
                        if info:
                            _connect(node.side_work.add_peer, end(engine_id), info, outbox)
                case SessionHint(owner, session, keep_s) if keep_s:
                    self._hints.put(owner, session, keep_s)
                case SessionHint(owner, session):
                    self._hints.forget(owner, session)
                    self._engine.features.hint_session(owner, session, 0.0)
                case ShareCommand():
                    node.side_work.share_prefix(command, received_at)
                case AbortAll():
                    self._adapters.abort(command)
                    node.abort_jobs(command)
                    node.side_work.abort(command)
                case _:
                    logger.warning("this node does not handle %s", type(command).__name__)
        self._hints.handle_waiting()
        for item in self._adapters.take_ready():
            if isinstance(item, Failure):
                code = "DEADLINE_EXCEEDED" if item.is_late else ADAPTER_MISSING
                outbox.fail(item.command.request_id, item.command.epoch, code, item.problem)
                continue
            received_at, waited = item
            assert isinstance(waited, self._job)
            self._start(node, outbox, waited, received_at, has_waited=True)

    def _start(
        self,
        node: CommandHandler[Job],
        outbox: Outbox,
        command: Job,
        received_at: float,
        *,
        has_waited: bool = False,
    ) -> None:
        """Let the node start a command now, or once the command's adapter is in memory."""
        try:
            if has_waited or self._adapters.admit(command, received_at):
                node.start_job(command, received_at)
                self._pin(command)
        except AdapterMissingError as error:
            node.cancel_job(command.request_id, command.epoch)  # ends transfers for its prompt
            outbox.fail(command.request_id, command.epoch, ADAPTER_MISSING, str(error))

    def _pin(self, command: Job) -> None:
        """Pin the prefixes that a started command names; do nothing if the node refused it."""
        request = self._engine.requests.get(command.request_id)
        if command.pins is not None and request is not None:
            self._engine.features.pins.begin(request, command.pins)

    def is_expiry_due(self, now: float) -> bool:
        """Return whether the node must check for expired requests now.

        If the result is True, the next interval begins.
        """
        if now < self._expire_at:
            return False
        self._expire_at = now + EXPIRY_INTERVAL_S
        return True


def _connect(
    connect: Callable[[PeerInfo], object], engine_id: str, peer_info: bytes, outbox: Outbox
) -> None:
    """Connect to an end of a peer, or report why this is impossible."""
    try:
        connect(PeerInfo.decode(peer_info, engine_id=engine_id))
    except TransferError as error:
        outbox.emit(PeerReport(engine_id, False, problem=str(error)))


class Outbox:
    """Sends a node's events to the router: deltas at the end of a step, reports at once.

    Args:
        emit: sends events to the router; called on the node's thread.
    """

    def __init__(self, emit: Callable[[NodeEvent], None]) -> None:
        self.emit = emit
        self._deltas: list[RequestDelta] = []

    def put(self, delta: RequestDelta) -> None:
        """Queue a delta (a request's new tokens or end) for the router."""
        self._deltas.append(delta)

    def fail(self, request_id: str, epoch: int, code: str, message: str) -> None:
        """Queue the failure of a request for the router."""
        self._deltas.append(failed_delta(request_id, epoch, RequestError(code, message)))

    def report_peer(self, event: TransferEvent, *, is_encode_node: bool = False) -> None:
        """Tell the router at once that a peer has connected or failed."""
        peer, shown = event.engine_id, is_encode_node
        if event.kind is TransferEventKind.PEER_CONNECTED:
            rate = event.bandwidth_bytes_per_s
            self.emit(PeerReport(peer, True, event.transport, "", rate, is_encode_node=shown))
        else:
            self.emit(PeerReport(peer, False, problem=event.reason, is_encode_node=shown))

    def flush(self) -> None:
        """Send the queued deltas as one event."""
        if self._deltas:
            self.emit(tuple(self._deltas))
            self._deltas.clear()


def is_busy(engine: Engine, scheduled: SchedulerOutput, result: StepResult) -> bool:
    """Return whether the node must step again at once.

    `Engine.has_work` would be wrong here: requests that wait for blocks can continue only after
    another step has ended.
    """
    has_ended = bool(result.scheduled.scheduled)
    busy = scheduled.scheduled or has_ended or engine.step_in_flight
    return bool(busy or engine.awaits_masks)  # no thread wakes the node for a mask
