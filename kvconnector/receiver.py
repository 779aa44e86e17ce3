"""Receiver: the decode node's end of the handoff, over any transport.

It translates between messages and events; who may write where, and until when, is decided by the
node (`decode_node/reservations.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from baton.outputs import PushReceipt
from kvconnector.base import KVReservation, KVTransport, TransferEvent, TransferEventKind
from kvconnector.digests import Arrival, BlockDigests, Verifier
from kvconnector.endpoint import Endpoint
from kvconnector.messages import (
    Beat,
    Cancel,
    Commit,
    Digests,
    Grant,
    Hello,
    HelloAck,
    Message,
    Quiet,
    Resend,
    Start,
    Verified,
    Watermark,
)
from kvconnector.peer_info import PeerInfo
from kvconnector.repeats import Repeats

logger = logging.getLogger(__name__)


class Receiver:
    """See `KVReceiver` for the contract.

    Args:
        transport: how bytes travel; owned from now on.
        on_event: called (on another thread) when `poll` has something.
        on_death: called (on another thread) when the connector cannot continue.
        clock: seconds that never go back.
        digests: of this node's memory, if what arrives is to be checked before anybody hears of it.
    """

    def __init__(
        self,
        transport: KVTransport,
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        digests: BlockDigests | None = None,
    ) -> None:
        self._info = transport.peer_info
        self._clock = clock
        self._grants = Repeats()  # neither committed nor ended yet
        self._verifier = None if digests is None else Verifier(digests)  # of the I/O thread
        self._endpoint = Endpoint(
            transport,
            on_message=self._on_message,
            progress=self._progress,
            on_event=on_event,
            on_death=on_death,
            clock=clock,
        )
        self._endpoint.start()

    # ------------------------------------------------------------------ the node's thread

    @property
    def peer_info(self) -> PeerInfo:
        return self._info

    def describe(self) -> bytes:
        return self._info.encode()

    def connect(self, peer: PeerInfo) -> None:
        self._endpoint.submit(lambda: self._endpoint.add_peer(peer))

    def disconnect(self, engine_id: str) -> None:
        def call() -> None:
            self._grants.remove_peer(engine_id)
            self._endpoint.peers.remove(engine_id)
            if self._verifier is not None:
                self._verifier.forget_peer(engine_id)

        self._endpoint.submit(call)

    def grant(self, reservation: KVReservation) -> None:
        message = Grant(
            engine_id=self._info.engine_id,
            request_id=reservation.request_id,
            epoch=reservation.epoch,
            block_ids=list(reservation.block_ids),
            first_block=reservation.first_block,
        )

        def call() -> None:
            key = (message.request_id, message.epoch)
            if self._verifier is not None:
                self._verifier.expect(
                    key, reservation.engine_id, reservation.block_ids, reservation.first_block
                )
            self._grants.add(key, reservation.engine_id, message, self._clock())
            self._endpoint.peers.send(reservation.engine_id, message)

        self._endpoint.submit(call)

    def cancel(self, request_id: str, epoch: int, engine_id: str) -> None:
        message = Cancel(engine_id=self._info.engine_id, request_id=request_id, epoch=epoch)

        def call() -> None:
            if self._verifier is not None:
                self._verifier.forget((request_id, epoch))
            self._grants.remove((request_id, epoch), engine_id)
            self._endpoint.peers.send(engine_id, message)

        self._endpoint.submit(call)

    def expect(self, expecting: bool) -> None:
        self._endpoint.expect(expecting)

    def poll(self) -> list[TransferEvent]:
        return self._endpoint.poll()

    def close(self) -> None:
        self._endpoint.close()

    # ------------------------------------------------------------------ the I/O thread

    def _progress(self) -> bool:
        """Repeat grants: of a transfer that is over at the sender's, its end was lost."""
        for _, grant in self._grants.take_due(self._clock()):
            self._endpoint.peers.send(grant.engine_id, grant.message)
        return False

    def _on_message(self, message: Message) -> None:
        self._endpoint.peers.note_alive(message.engine_id, self._clock())
        if isinstance(message, Commit | Quiet):
            self._grants.remove((message.request_id, message.epoch), message.engine_id)
        elif isinstance(message, Watermark):
            key = (message.request_id, message.epoch)
            self._grants.put_off(key, message.engine_id, self._clock())
        match message:
            case Hello():
                ack = HelloAck(engine_id=self._info.engine_id, sent_at_s=message.sent_at_s)
                self._answer(message.engine_id, ack)
            case Beat():
                beat = Beat(engine_id=self._info.engine_id, sent_at_s=message.sent_at_s)
                self._answer(message.engine_id, beat)
            case Start():
                self._emit(TransferEventKind.STARTED, message, num_tokens=message.num_tokens)
            case Watermark() | Commit() if self._verifier is not None:
                self._note(self._verifier, message)
            case Watermark():
                self._emit(TransferEventKind.WATERMARK, message, num_tokens=message.num_tokens)
            case Commit():
                self._emit_commit(message)
            case Digests():
                if self._verifier is not None:
                    self._check(self._verifier, message)
            case Quiet():
                if self._verifier is not None:
                    self._verifier.forget((message.request_id, message.epoch))
                self._emit(TransferEventKind.FAILED, message, reason=message.reason)
            case _:  # only a sender receives the others
                pass

    def _note(self, verifier: Verifier, message: Watermark | Commit) -> None:
        """Keep it until all that it speaks of is verified."""
        arrival = verifier.find((message.request_id, message.epoch), message.engine_id)
        if arrival is None:
            if isinstance(message, Commit):  # it is over here, and the sender does not know
                self.cancel(message.request_id, message.epoch, message.engine_id)
            return
        if isinstance(message, Watermark):
            arrival.watermark = message
        else:
            if arrival.commit is not None:  # it asks again: what we wanted again may be lost
                self._ask_again(message, arrival)
            arrival.commit = message
        self._tell_verified(verifier, arrival)

    def _ask_again(self, commit: Commit, arrival: Arrival) -> None:
        """Say once more what arrived wrong and has not come again."""
        for index, layers in arrival.missing:
            resend = Resend(
                engine_id=self._info.engine_id,
                request_id=commit.request_id,
                epoch=commit.epoch,
                indices=[index],
                layers=layers,
                attempt=arrival.attempts[index, layers],
            )
            self._endpoint.peers.send(commit.engine_id, resend)

    def _check(self, verifier: Verifier, message: Digests) -> None:
        resend = verifier.check(message, self._info.engine_id)
        if resend is not None:
            logger.warning(
                "%d blocks of request %s arrived wrong, attempt %d",
                len(resend.indices),
                message.request_id,
                resend.attempt,
            )
            self._endpoint.peers.send(message.engine_id, resend)
        arrival = verifier.find((message.request_id, message.epoch), message.engine_id)
        if arrival is not None:
            self._tell_verified(verifier, arrival)

    def _tell_verified(self, verifier: Verifier, arrival: Arrival) -> None:
        """Let out what was kept, as far as it may be believed now."""
        watermark, commit = arrival.watermark, arrival.commit
        if commit is not None and verifier.is_verified(arrival, len(arrival.block_ids)):
            verifier.forget((commit.request_id, commit.epoch))
            verified = Verified(
                engine_id=self._info.engine_id, request_id=commit.request_id, epoch=commit.epoch
            )
            self._endpoint.peers.send(commit.engine_id, verified)
            self._emit_commit(commit)
        elif watermark is not None and verifier.is_verified(arrival, watermark.num_blocks):
            arrival.watermark = None
            self._emit(TransferEventKind.WATERMARK, watermark, num_tokens=watermark.num_tokens)

    def _answer(self, engine_id: str, message: HelloAck | Beat) -> None:
        if self._endpoint.peers.send(engine_id, message):
            self._endpoint.peers.confirm(engine_id)

    def _emit(
        self,
        kind: TransferEventKind,
        message: Start | Watermark | Quiet,
        *,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        self._endpoint.emit(
            TransferEvent(
                kind=kind,
                engine_id=message.engine_id,
                request_id=message.request_id,
                epoch=message.epoch,
                num_tokens=num_tokens,
                reason=reason,
            )
        )

    def _emit_commit(self, commit: Commit) -> None:
        self._endpoint.emit(
            TransferEvent(
                kind=TransferEventKind.COMMITTED,
                engine_id=commit.engine_id,
                request_id=commit.request_id,
                epoch=commit.epoch,
                num_tokens=commit.num_tokens,
                token_id=commit.token_id,
                receipt=PushReceipt(
                    num_bytes=commit.num_bytes,
                    num_blocks=commit.num_blocks,
                    transport=commit.transport,
                    exposed_transfer_s=commit.exposed_transfer_s,
                    num_descriptors=commit.num_descriptors,
                    posting_s=commit.posting_s,
                ),
            )
        )
