"""Receiver: the decode node's end of the handoff, over any transport.

It translates between messages and events; who may write where, and until when, is decided by the
node (`decode_node/reservations.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from baton.outputs import PushReceipt
from kvconnector.base import KVReservation, KVTransport, TransferEvent, TransferEventKind
from kvconnector.endpoint import Endpoint
from kvconnector.messages import (
    Cancel,
    Commit,
    Grant,
    Hello,
    HelloAck,
    Message,
    Quiet,
    Start,
    Watermark,
)
from kvconnector.peer_info import PeerInfo


class Receiver:
    """See `KVReceiver` for the contract.

    Args:
        transport: how bytes travel; owned from now on.
        on_event: called (on another thread) when `poll` has something.
        on_death: called (on another thread) when the connector cannot continue.
    """

    def __init__(
        self,
        transport: KVTransport,
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
    ) -> None:
        self._info = transport.peer_info
        self._greeted: set[str] = set()
        self._endpoint = Endpoint(
            transport,
            on_message=self._on_message,
            progress=lambda: False,
            on_event=on_event,
            on_death=on_death,
        )
        self._endpoint.start()

    # ------------------------------------------------------------------ the node's thread

    @property
    def peer_info(self) -> PeerInfo:
        return self._info

    def describe(self) -> bytes:
        return self._info.encode()

    def connect(self, peer: PeerInfo) -> None:
        def call() -> None:
            self._greeted.discard(peer.engine_id)  # who asks anew wants to hear of it anew
            self._endpoint.add_peer(peer)

        self._endpoint.submit(call)

    def disconnect(self, engine_id: str) -> None:
        self._endpoint.submit(lambda: self._disconnect(engine_id))

    def grant(self, reservation: KVReservation) -> None:
        message = Grant(
            engine_id=self._info.engine_id,
            request_id=reservation.request_id,
            epoch=reservation.epoch,
            block_ids=list(reservation.block_ids),
            first_block=reservation.first_block,
        )
        self._send(reservation.engine_id, message)

    def cancel(self, request_id: str, epoch: int, engine_id: str) -> None:
        message = Cancel(engine_id=self._info.engine_id, request_id=request_id, epoch=epoch)
        self._send(engine_id, message)

    def expect(self, expecting: bool) -> None:
        self._endpoint.expect(expecting)

    def poll(self) -> list[TransferEvent]:
        return self._endpoint.poll()

    def close(self) -> None:
        self._endpoint.close()

    # ------------------------------------------------------------------ the I/O thread

    def _send(self, engine_id: str, message: Message) -> None:
        def call() -> None:
            if not self._endpoint.send(engine_id, message) and engine_id in self._greeted:
                self._greeted.discard(engine_id)
                self._endpoint.fail_peer(engine_id, "it cannot be reached")

        self._endpoint.submit(call)

    def _disconnect(self, engine_id: str) -> None:
        self._greeted.discard(engine_id)
        self._endpoint.remove_peer(engine_id)

    def _on_message(self, message: Message) -> None:
        match message:
            case Hello():
                self._greet(message.engine_id)
            case Start():
                self._emit(TransferEventKind.STARTED, message, num_tokens=message.num_tokens)
            case Watermark():
                self._emit(TransferEventKind.WATERMARK, message, num_tokens=message.num_tokens)
            case Commit():
                self._emit_commit(message)
            case Quiet():
                self._emit(TransferEventKind.FAILED, message, reason=message.reason)
            case _:  # only a sender receives the others
                pass

    def _greet(self, engine_id: str) -> None:
        if not self._endpoint.send(engine_id, HelloAck(engine_id=self._info.engine_id)):
            return
        if engine_id in self._greeted:
            return
        self._greeted.add(engine_id)
        self._endpoint.emit(
            TransferEvent(
                kind=TransferEventKind.PEER_CONNECTED,
                engine_id=engine_id,
                transport=self._endpoint.paths[engine_id],
            )
        )

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
                ),
            )
        )
