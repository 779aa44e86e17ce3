"""Reservations: blocks offered to prefill nodes until their KV arrives.

    PARKED -> GRANTED -> RECEIVING -> COMMITTED          its blocks belong to the running request
        `--------`-----------`------> QUARANTINED -> free

Takes a parked Request, gives grants; takes transfer events, gives arrivals and failures. A block
that a peer may still write has a holder here until the peer says it is quiet or is known dead.
Knows no RPC and no tensor.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum

from baton.outputs import PushReceipt
from engine.engine import Engine
from engine.request import Request
from kvconnector.base import KVReceiver, KVReservation, TransferEvent, TransferEventKind
from kvconnector.peer_info import PeerInfo, host_identity

logger = logging.getLogger(__name__)

# How long a START may come before its DECODE command, and how long an ended request is remembered.
MEMORY_S = 60.0


class ReservationState(Enum):
    """Where a reservation is."""

    PARKED = "PARKED"
    GRANTED = "GRANTED"
    RECEIVING = "RECEIVING"
    COMMITTED = "COMMITTED"
    QUARANTINED = "QUARANTINED"


@dataclass(slots=True)
class Reservation:
    """One request's blocks on their way from "promised" to "arrived".

    Attributes:
        num_received_tokens: the watermark.
        committed_at_step: engine steps done when the commit was taken.
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
    receipt: PushReceipt | None = None


Key = tuple[str, int]  # (request_id, epoch)


class Reservations:
    """All reservations of one decode node.

    Args:
        engine: where the blocks are.
        receiver: where grants go.
    """

    def __init__(self, engine: Engine, receiver: KVReceiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._open: dict[Key, Reservation] = {}  # PARKED, GRANTED, RECEIVING
        self._quarantine: dict[Key, Reservation] = {}
        self._wants_grant: deque[Key] = deque()
        self._early_starts: dict[Key, float] = {}
        self._ended: dict[Key, float] = {}  # tombstones
        self._gone_peers: dict[str, PeerInfo] = {}
        self._peers: dict[str, PeerInfo] = {}

    # ------------------------------------------------------------------ in

    def add_peer(self, peer: PeerInfo) -> None:
        self._peers[peer.engine_id] = peer
        self._receiver.connect(peer)

    def park(self, request: Request, epoch: int, engine_id: str) -> Reservation:
        """Take a request whose prompt ``engine_id`` computes."""
        key = (request.request_id, epoch)
        reservation = Reservation(request, epoch, engine_id, time.monotonic())
        self._engine.park(request)
        self._open[key] = reservation
        if self._early_starts.pop(key, None) is not None:
            self._wants_grant.append(key)
        return reservation

    def settle(self, event: TransferEvent) -> Reservation | None:
        """Take a transfer event; returns the reservation if it is now COMMITTED or has failed.

        A failed one is out of the engine and in quarantine or free; its state is QUARANTINED.
        """
        key = (event.request_id, event.epoch)
        reservation = self._open.get(key)
        if reservation is None or reservation.engine_id != event.engine_id:
            self._settle_ended(key, event)
            return None
        match event.kind:
            case TransferEventKind.STARTED:
                if reservation.state is ReservationState.PARKED and key not in self._wants_grant:
                    self._wants_grant.append(key)
            case TransferEventKind.WATERMARK:
                if reservation.state is not ReservationState.PARKED:
                    reservation.state = ReservationState.RECEIVING
                    reservation.num_received_tokens = event.num_tokens
            case TransferEventKind.COMMITTED:
                if self._commit(key, reservation, event):
                    return reservation
            case TransferEventKind.FAILED:
                self._end(key, reservation, quiet=True)
                return reservation
            case _:
                pass
        return None

    def grant_waiting(self) -> None:
        """Give blocks to started requests, first come first served, as far as memory goes."""
        while self._wants_grant:
            key = self._wants_grant[0]
            reservation = self._open.get(key)
            if reservation is None:  # ended meanwhile
                self._wants_grant.popleft()
                continue
            block_ids = self._engine.grant(key[0])
            if block_ids is None:
                return
            self._wants_grant.popleft()
            reservation.block_ids = tuple(block_ids)
            reservation.state = ReservationState.GRANTED
            self._receiver.grant(
                KVReservation(
                    request_id=key[0],
                    epoch=reservation.epoch,
                    engine_id=reservation.engine_id,
                    block_ids=reservation.block_ids,
                )
            )

    # ------------------------------------------------------------------ out

    def cancel(self, request_id: str, epoch: int) -> None:
        """End a reservation early; harmless when it is not (or no longer) here."""
        key = (request_id, epoch)
        reservation = self._open.get(key)
        if reservation is not None:
            self._end(key, reservation, quiet=False)

    def lose_peer(self, engine_id: str) -> list[Reservation]:
        """A prefill node is gone: end what it had begun; returns those reservations."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._gone_peers[engine_id] = peer
        lost = [r for r in self._open.values() if r.engine_id == engine_id]
        for reservation in lost:
            self._end((reservation.request.request_id, reservation.epoch), reservation, quiet=False)
        self._receiver.disconnect(engine_id)
        return lost

    def tick(self) -> None:
        """Free what dead peers held, forget what is old; call now and then."""
        for engine_id, peer in list(self._gone_peers.items()):
            if _is_dead(peer):
                for key, reservation in list(self._quarantine.items()):
                    if reservation.engine_id == engine_id:
                        self._free_quarantined(key)
                del self._gone_peers[engine_id]
        oldest = time.monotonic() - MEMORY_S
        for memory in (self._early_starts, self._ended):
            while memory and (key := next(iter(memory))) and memory[key] < oldest:
                del memory[key]

    # ------------------------------------------------------------------ what operators see

    @property
    def has_open(self) -> bool:
        """Whether anything may arrive."""
        return bool(self._open or self._quarantine)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of ended requests that a peer may still write."""
        return sum(len(r.block_ids) for r in list(self._quarantine.values()))

    # ------------------------------------------------------------------ inside

    def _commit(self, key: Key, reservation: Reservation, event: TransferEvent) -> bool:
        request = reservation.request
        if (
            reservation.state is ReservationState.PARKED
            or event.num_tokens != request.num_prompt_tokens
            or not 0 <= event.token_id < self._engine.model_config.vocab_size
        ):
            logger.warning("dropped a commit that does not fit request %s", request.request_id)
            return False
        del self._open[key]
        reservation.state = ReservationState.COMMITTED
        reservation.num_received_tokens = event.num_tokens
        reservation.receipt = event.receipt
        reservation.committed_at = time.monotonic()
        reservation.committed_at_step = self._engine.num_steps
        self._engine.commit(request.request_id, event.token_id)
        return True

    def _end(self, key: Key, reservation: Reservation, *, quiet: bool) -> None:
        """Take a reservation out of the engine; unless the wire is quiet, quarantine its blocks."""
        del self._open[key]
        self._ended[key] = time.monotonic()
        reservation.state = ReservationState.QUARANTINED
        if reservation.block_ids and not quiet:
            self._engine.hold(reservation.block_ids)
            self._quarantine[key] = reservation
            self._receiver.cancel(key[0], key[1], reservation.engine_id)
        self._engine.abort(key[0])

    def _settle_ended(self, key: Key, event: TransferEvent) -> None:
        """An event about a request that ended here, or has not come yet."""
        match event.kind:
            case TransferEventKind.COMMITTED | TransferEventKind.FAILED:
                self._early_starts.pop(key, None)
                self._free_quarantined(key)
            case TransferEventKind.STARTED if key in self._ended:
                self._receiver.cancel(key[0], key[1], event.engine_id)
            case TransferEventKind.STARTED:
                self._early_starts[key] = time.monotonic()
            case _:
                pass

    def _free_quarantined(self, key: Key) -> None:
        reservation = self._quarantine.pop(key, None)
        if reservation is not None:
            self._engine.release(reversed(reservation.block_ids))


def _is_dead(peer: PeerInfo) -> bool:
    """Whether a peer's process has certainly ended. Of another machine we cannot say."""
    if not peer.host or peer.host != host_identity() or peer.pid == 0:
        return False
    try:
        os.kill(peer.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
