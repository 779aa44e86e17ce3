"""Reservations: the blocks of each parked request, until a prefill node has written their KV.

    PARKED -> GRANTED -> RECEIVING -> COMMITTED          its blocks belong to the running request
        `--------`-----------`------> QUARANTINED -> free

Parks requests, grants blocks, and applies transfer events. A prefill node sends `Start` once it
computes a request's prompt, and may write after the grant. `Quiet` says that the prefill node
writes no more for this request. Blocks that a peer may still write after a request's end go into
quarantine (`node_runtime/quarantine.py`). Refuses to know: RPCs, tensors.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.api.outputs import PushReceipt
from baton.telemetry.ledger import BlockHolding, BlockOwner
from decode_node.grant_queue import GrantQueue, Key
from decode_node.options import DecodeOptions
from engine.core.request import Request
from engine.engine import Engine
from kvconnector.base import (
    HandoffMetrics,
    KVReservation,
    TransferEvent,
    TransferEventKind,
    TransferOutcome,
)
from kvconnector.ends import Receiver
from kvconnector.peer_info import PeerInfo
from node_runtime.quarantine import Quarantine

logger = logging.getLogger(__name__)

# Seconds for which to remember an ended request, or a `Start` that came before its `DecodeCommand`.
MEMORY_S = 60.0
# Maximum number of `Start` messages that are kept, because their `DecodeCommand` may never come.
MAX_EARLY_STARTS = 10_000
TICK_S = 0.1
NO_PUSH = PushReceipt(num_bytes=0, num_blocks=0, transport="", exposed_transfer_s=0.0)


class ReservationState(Enum):
    """States of a reservation. It is COMMITTED from the start if this node computes the prompt."""

    PARKED = "PARKED"
    GRANTED = "GRANTED"
    RECEIVING = "RECEIVING"
    COMMITTED = "COMMITTED"
    QUARANTINED = "QUARANTINED"


@dataclass(slots=True)
class Reservation:
    """The blocks of one request, from when it is parked until its KV has arrived.

    Attributes:
        block_ids: blocks that the prefill node may write.
        num_received_tokens: leading tokens whose KV is complete, by the highest watermark.
        committed_at_step: number of steps that the engine had ended before the commit.
        start_is_received: whether `Start` came, so that the prefill node waits for a grant.
    """

    request: Request
    epoch: int
    engine_id: str
    parked_at: float
    state: ReservationState = ReservationState.PARKED
    block_ids: tuple[int, ...] = ()
    num_received_tokens: int = 0
    committed_at: float = 0.0
    committed_at_step: int = 0
    start_is_received: bool = False
    receipt: PushReceipt | None = None


class Reservations:
    """All reservations of one decode node.

    Args:
        engine: owner of the blocks.
        receiver: sends grants to prefill nodes.
        options: limits of how much KV may arrive at a time.
        clock: returns seconds, never going back.

    Attributes:
        quarantine: blocks that peers may still write after a request's end.
    """

    def __init__(
        self,
        engine: Engine,
        receiver: Receiver,
        options: DecodeOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._receiver = receiver
        # Reservations that are PARKED, GRANTED or RECEIVING
        self._open: dict[Key, Reservation] = {}
        self.quarantine = Quarantine(engine.block_pool, receiver, clock)
        self._grants = GrantQueue(
            engine,
            max_requests=options.max_receiving_requests,
            max_tokens=options.max_receiving_tokens,
        )
        # Arrival times of early `Start` messages, by request and engine id, sorted by time
        self._early_starts: dict[tuple[Key, str], float] = {}
        self._ended: dict[Key, float] = {}  # when each reservation ended, for a late `Start`
        self._tick_at = 0.0
        self._outcomes: Counter[TransferOutcome] = Counter()
        self._received_bytes = 0

    # ------------------------------------------------------------------ reservations begin

    def add_peer(self, peer: PeerInfo) -> None:
        """Connect a prefill node that joined the router, or joined it again."""
        self.quarantine.meet(peer)
        self._receiver.connect(peer)

    def park(self, request: Request, epoch: int, engine_id: str, received_at: float) -> Reservation:
        """Park a request whose prompt the prefill node ``engine_id`` computes."""
        key = (request.request_id, epoch)
        reservation = Reservation(request, epoch, engine_id, received_at)
        self._engine.park(request)
        self._open[key] = reservation
        if self._early_starts.pop((key, engine_id), None) is not None:
            self._queue_for_grant(key, reservation)
        return reservation

    def skip_handoff(
        self, request: Request, epoch: int, engine_id: str, received_at: float
    ) -> Reservation:
        """Return a COMMITTED reservation for a request whose prompt this node computes.

        Prefill node ``engine_id`` gets a `Cancel` for its `Start`, which may have come or may come.
        """
        key = (request.request_id, epoch)
        now = self._clock()
        self._ended[key] = now  # a `Start` for this request may still arrive
        if self._early_starts.pop((key, engine_id), None) is not None:
            self._receiver.cancel(key[0], epoch, engine_id)
        return Reservation(
            request,
            epoch,
            engine_id,
            received_at,
            state=ReservationState.COMMITTED,
            committed_at=now,
            committed_at_step=self._engine.num_steps,
            receipt=NO_PUSH,
        )

    def settle(self, event: TransferEvent) -> Reservation | None:
        """Apply a transfer event; return the reservation if it is now COMMITTED or has failed.

        A failed reservation is QUARANTINED: request aborted, blocks free or in quarantine.
        """
        key = (event.request_id, event.epoch)
        reservation = self._open.get(key)
        if reservation is None or reservation.engine_id != event.engine_id:
            self._settle_ended(key, event)
            return None
        match event.kind:
            case TransferEventKind.STARTED:
                self._queue_for_grant(key, reservation)
            case TransferEventKind.WATERMARK:
                self._note_watermark(reservation, event.num_tokens)
            case TransferEventKind.COMMITTED:
                if not self._commit(key, reservation, event):
                    # The peer writes no more, but its commit does not fit the request.
                    reservation.num_received_tokens = 0
                    self._end(key, reservation, TransferOutcome.FAILED, quiet=True)
                return reservation
            case TransferEventKind.FAILED:
                self._end(key, reservation, event.outcome, quiet=True)
                return reservation
            case _:
                pass
        return None

    def grant_waiting(self) -> None:
        """Grant blocks to requests whose `Start` came, as far as memory and budget allow."""
        while (taken := self._grants.grant_next()) is not None:
            key, granted = taken
            reservation = self._open[key]
            reservation.block_ids = granted.block_ids
            reservation.state = ReservationState.GRANTED
            self._receiver.grant(
                KVReservation(
                    request_id=key[0],
                    epoch=reservation.epoch,
                    engine_id=reservation.engine_id,
                    block_ids=granted.block_ids,
                    first_block=granted.first_block,
                    groups=granted.groups,
                )
            )

    # ------------------------------------------------------------------ reservations end early

    def cancel(self, request_id: str, epoch: int) -> None:
        """End the reservation of a request early; do nothing if the request is unknown."""
        key = (request_id, epoch)
        reservation = self._open.get(key)
        if reservation is not None:
            self._end(key, reservation, TransferOutcome.CANCELLED, quiet=False)

    def lose_peer(self, engine_id: str) -> list[Reservation]:
        """End all reservations of a prefill node that the router has lost; return them.

        The prefill node may be alive, so it stays connected until it sends `Quiet` or is known to
        be dead.
        """
        self.quarantine.lose(engine_id)
        return self.end_all_of(engine_id)

    def end_all_of(self, engine_id: str) -> list[Reservation]:
        """End all reservations whose prefill node cannot be reached; return them."""
        lost = [r for r in self._open.values() if r.engine_id == engine_id]
        for reservation in lost:
            key = (reservation.request.request_id, reservation.epoch)
            self._end(key, reservation, TransferOutcome.FAILED, quiet=False)
        return lost

    def tick(self) -> None:
        """Run the quarantine's periodic work, and drop old entries; call often."""
        now = self._clock()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_S
        self.quarantine.tick()
        oldest = now - MEMORY_S
        while self._early_starts and next(iter(self._early_starts.values())) < oldest:
            del self._early_starts[next(iter(self._early_starts))]
        while self._ended and next(iter(self._ended.values())) < oldest:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------------ what operators see

    @property
    def has_open(self) -> bool:
        """Return whether KV may still arrive for an open or quarantined request."""
        return bool(self._open or self.quarantine)

    @property
    def num_transfers(self) -> int:
        """Return the number of reservations that are open, or whose blocks are in quarantine."""
        return len(self._open) + len(self.quarantine)

    def metrics(self) -> HandoffMetrics:
        """Return counts of hand-offs; safe from any thread."""
        states = Counter(dict.fromkeys(("PARKED", "GRANTED", "RECEIVING"), 0))
        states.update(reservation.state.value for reservation in list(self._open.values()))
        states[ReservationState.QUARANTINED.value] = len(self.quarantine)
        return HandoffMetrics(
            open=states,
            ended=self._outcomes.copy(),
            num_quarantined_blocks=self.quarantine.num_blocks,
            received_bytes=self._received_bytes,
        )

    def held(self) -> list[BlockHolding]:
        """Return the blocks that prefill nodes may write; for checks of invariants."""
        now = self._clock()
        granted = [
            BlockHolding(
                owner=BlockOwner.GRANT,
                block_ids=tuple(reservation.request.block_ids),
                request_id=request_id,
                epoch=epoch,
                state=reservation.state.value,
                peer=reservation.engine_id,
                age_s=now - reservation.parked_at,
            )
            for (request_id, epoch), reservation in self._open.items()
        ]
        return granted + self.quarantine.ledger()

    # ------------------------------------------------------------------ inside

    def _queue_for_grant(self, key: Key, reservation: Reservation) -> None:
        """Queue a parked request for its blocks; only once, as a `Start` may come several times."""
        if not reservation.start_is_received:
            reservation.start_is_received = True
            self._grants.add_parked(key, reservation.request)

    @staticmethod
    def _note_watermark(reservation: Reservation, num_tokens: int) -> None:
        if reservation.state is ReservationState.PARKED:
            return
        if num_tokens > reservation.request.num_initial_tokens:
            logger.warning("dropped a watermark of more tokens than its request has")
            return
        reservation.state = ReservationState.RECEIVING
        reservation.num_received_tokens = max(reservation.num_received_tokens, num_tokens)

    def _commit(self, key: Key, reservation: Reservation, event: TransferEvent) -> bool:
        request, record = reservation.request, event.record
        if (
            reservation.state is ReservationState.PARKED
            or record is None
            or record.num_tokens != request.num_initial_tokens
            or record.token_id >= self._engine.model_config.vocab_size
            or record.adapter != request.adapter
        ):
            logger.warning("refused a commit that does not fit request %s", request.request_id)
            return False
        del self._open[key]
        self._grants.end_transfer(key)
        reservation.state = ReservationState.COMMITTED
        reservation.num_received_tokens = record.num_tokens
        reservation.receipt = event.receipt
        self._outcomes[TransferOutcome.COMMITTED] += 1
        self._received_bytes += event.receipt.num_bytes if event.receipt else 0
        reservation.committed_at = self._clock()
        reservation.committed_at_step = self._engine.num_steps
        self._engine.commit(request.request_id, record.token_id, record.draft_token_ids)
        return True

    def _end(
        self, key: Key, reservation: Reservation, outcome: TransferOutcome, *, quiet: bool
    ) -> None:
        """End a reservation, and abort its request in the engine.

        KV up to the watermark stays in the prefix cache, for a later attempt. The other blocks go
        into quarantine, unless ``quiet`` says that the peer writes no more for this request.
        """
        del self._open[key]
        self._grants.end_transfer(key)
        self._ended[key] = self._clock()
        self._outcomes[outcome] += 1
        reservation.state = ReservationState.QUARANTINED
        if reservation.block_ids:
            reservation.block_ids = self._engine.kv_cache_manager.keep_received(
                reservation.request, reservation.num_received_tokens
            )
        # A peer that sent no `Start` writes nothing; a later `Start` finds the request in `_ended`.
        if reservation.start_is_received and not quiet:
            engine_id, block_ids = reservation.engine_id, reservation.block_ids
            if block_ids:
                self.quarantine.hold_blocks(key, engine_id, block_ids, reservation.parked_at)
            self._receiver.cancel(key[0], key[1], engine_id)
        self._engine.abort(key[0])

    def _settle_ended(self, key: Key, event: TransferEvent) -> None:
        """Apply an event of a request that has ended here, or whose command has not come yet."""
        match event.kind:
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                self._early_starts.pop((key, event.engine_id), None)
                self.quarantine.free(key, event.engine_id)
            case TransferEventKind.STARTED if key in self._ended:
                self._receiver.cancel(key[0], key[1], event.engine_id)
            case TransferEventKind.STARTED:
                self._early_starts.pop((key, event.engine_id), None)  # moves to the table's end
                self._early_starts[key, event.engine_id] = self._clock()
                if len(self._early_starts) > MAX_EARLY_STARTS:
                    del self._early_starts[next(iter(self._early_starts))]
            case _:
                pass
