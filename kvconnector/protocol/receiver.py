"""Receiver: the decode node's end of the handoff, over any transport.

It translates between messages and events; who may write where, and until when, is decided by the
node (`decode_node/reservations.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from baton.api.outputs import PushReceipt
from baton.link.round_watch import Rounds
from baton.telemetry.node_metrics import ConnectorMetrics
from kvconnector.base import KVReservation, TransferEvent, TransferEventKind
from kvconnector.block_digests import BlockDigests
from kvconnector.endpoint import Endpoint
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.digests import Arrival, Verifier
from kvconnector.protocol.drains import Drains
from kvconnector.protocol.messages import (
    Beat,
    Cancel,
    Commit,
    Digests,
    Grant,
    Hello,
    HelloAck,
    Message,
    Quiet,
    SelfTest,
    Start,
    Verified,
    Watermark,
)
from kvconnector.protocol.repeats import REPEAT_S, Repeats
from kvconnector.protocol.self_test import TestSlots
from kvconnector.transports.base import KVTransport

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
        self._clock = clock
        self._grants = Repeats()  # neither committed nor ended yet
        self._num_wrong_blocks = 0
        self._drains = Drains()
        self._verifier = None if digests is None else Verifier(digests)  # of the I/O thread
        self._endpoint = Endpoint(
            transport,
            on_message=self._on_message,
            progress=self._progress,
            on_event=on_event,
            on_death=on_death,
            clock=clock,
        )
        self._info = self._endpoint.peer_info
        self._slots = TestSlots(transport.scratch, self._endpoint.peers, clock)
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
            self._slots.forget(engine_id)
            self._endpoint.peers.remove(engine_id)
            if self._verifier is not None:
                self._verifier.forget_peer(engine_id)

        self._endpoint.submit(call)

    def drain(self, engine_id: str) -> None:
        self._endpoint.submit(
            lambda: self._drains.add(engine_id, self._clock(), self._endpoint.num_reads)
        )

    def grant(self, reservation: KVReservation) -> None:
        message = Grant(
            engine_id=self._info.engine_id,
            request_id=reservation.request_id,
            epoch=reservation.epoch,
            block_ids=list(reservation.block_ids),
            first_block=reservation.first_block,
        )
        transport = self._endpoint.transport

        def call() -> None:
            key = (message.request_id, message.epoch)
            if self._verifier is not None:
                self._verifier.expect(
                    key, reservation.engine_id, reservation.block_ids, reservation.first_block
                )
            transport.allow(reservation.engine_id, key, reservation.block_ids)
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
            if self._endpoint.transport.forbid(engine_id, (request_id, epoch)):
                # Whatever the peer still sends is dropped: nobody need wait until it is quiet.
                self._endpoint.emit(
                    TransferEvent(
                        kind=TransferEventKind.FAILED,
                        engine_id=engine_id,
                        request_id=request_id,
                        epoch=epoch,
                    )
                )

        self._endpoint.submit(call)

    def expect(self, expecting: bool) -> None:
        self._endpoint.expect(expecting)

    def poll(self) -> list[TransferEvent]:
        return self._endpoint.poll()

    def metrics(self) -> ConnectorMetrics:
        return dataclasses.replace(self._endpoint.metrics(), wrong_blocks=self._num_wrong_blocks)

    @property
    def rounds(self) -> Rounds:
        """Of the KV I/O thread; safe from any thread."""
        return self._endpoint.rounds

    def close(self) -> None:
        self._endpoint.close()

    # ------------------------------------------------------------------ the I/O thread

    def _progress(self) -> bool:
        """Repeat grants: of a transfer that is over at the sender's, its end was lost."""
        for engine_id in self._drains.take_done(self._clock(), self._endpoint.num_reads):
            self._endpoint.emit(
                TransferEvent(kind=TransferEventKind.PEER_DRAINED, engine_id=engine_id)
            )
        for _, grant in self._grants.take_due(self._clock()):
            self._endpoint.peers.send(grant.engine_id, grant.message)
        return self._slots.tick()

    def _on_message(self, message: Message) -> None:
        self._endpoint.peers.note_alive(message.engine_id, self._clock())
        if isinstance(message, Commit | Quiet):
            self._grants.remove((message.request_id, message.epoch), message.engine_id)
        elif isinstance(message, Watermark):
            key = (message.request_id, message.epoch)
            self._grants.put_off(key, message.engine_id, self._clock())
        match message:
            case Hello():
                self._answer_hello(message)
            case Beat():
                self._answer_beat(message)
            case SelfTest():
                result = self._slots.judge(message)
                if result is not None:
                    self._endpoint.peers.send(message.engine_id, result)
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
                self._forbid(message)
                self._emit(TransferEventKind.FAILED, message, reason=message.reason)
            case _:  # only a sender receives the others
                pass

    def _note(self, verifier: Verifier, message: Watermark | Commit) -> None:
        """Keep it until all it speaks of is verified; a Commit comes again if that takes long."""
        arrival = verifier.find((message.request_id, message.epoch), message.engine_id)
        if isinstance(message, Watermark):
            if arrival is not None:
                arrival.watermark = message
                self._tell_verified(verifier, arrival)
        elif arrival is None:  # what we said of its end was lost
            self._send_verified(message)
        elif arrival.commit is None:
            arrival.commit, arrival.asked_at = message, self._clock()
            self._tell_verified(verifier, arrival)
        elif self._clock() - arrival.asked_at >= REPEAT_S / 2:  # not only doubled by the network
            arrival.asked_at = self._clock()
            for resend in verifier.ask_again(arrival, message, self._info.engine_id):
                self._endpoint.peers.send(message.engine_id, resend)

    def _check(self, verifier: Verifier, message: Digests) -> None:
        key = self._endpoint.peers.channels[message.engine_id].keys.receive_blocks
        resend = verifier.check(message, self._info.engine_id, key)
        if resend is not None:
            self._num_wrong_blocks += len(resend.indices)
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
            self._send_verified(commit)
            self._emit_commit(commit)
        elif watermark is not None and verifier.is_verified(arrival, watermark.num_blocks):
            arrival.watermark = None
            self._emit(TransferEventKind.WATERMARK, watermark, num_tokens=watermark.num_tokens)

    def _send_verified(self, commit: Commit) -> None:
        verified = Verified(
            engine_id=self._info.engine_id, request_id=commit.request_id, epoch=commit.epoch
        )
        self._endpoint.peers.send(commit.engine_id, verified)

    def _answer_beat(self, message: Beat) -> None:
        """Unless we know of no test that has passed: then it must greet us again."""
        peers = self._endpoint.peers
        beat = Beat(engine_id=self._info.engine_id, sent_at_s=message.sent_at_s)
        if peers[message.engine_id].is_tested and peers.send(message.engine_id, beat):
            peers.confirm(message.engine_id)

    def _answer_hello(self, hello: Hello) -> None:
        slot = self._slots.offer(hello.engine_id, hello.test)
        ack = HelloAck(
            engine_id=self._info.engine_id,
            sent_at_s=hello.sent_at_s,
            test=hello.test,
            slot=slot,
        )
        self._endpoint.peers.send(hello.engine_id, ack)

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

    def _forbid(self, message: Commit | Quiet) -> None:
        transfer = (message.request_id, message.epoch)
        self._endpoint.transport.forbid(message.engine_id, transfer)

    def _emit_commit(self, commit: Commit) -> None:
        self._forbid(commit)
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
