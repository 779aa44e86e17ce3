"""ReceiveMachine: the decode node's end of the hand-off, without I/O.

Turns peers' messages into events for the node, and the node's wishes into messages. The node
decides which peer may write to which blocks, and until when (`decode_node/reservations.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from baton.api.outputs import PushReceipt
from kvconnector.base import (
    HANDOFF_VERSION,
    NO_TRANSFER,
    KVReservation,
    TransferEvent,
    TransferEventKind,
    TransferKey,
)
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.actions import (
    Action,
    Allow,
    ConnectEnded,
    Drain,
    Drop,
    Forbid,
    Forbidden,
    Input,
    Leave,
    Meet,
    ReadFailed,
    SendEnded,
    SlotRead,
    Turn,
)
from kvconnector.protocol.dead_peers import DeadPeers
from kvconnector.protocol.messages import (
    Beat,
    Cancel,
    Commit,
    Digests,
    Grant,
    Hello,
    HelloAck,
    Quiet,
    SelfTest,
    Start,
    Watermark,
)
from kvconnector.protocol.peers import Peers
from kvconnector.protocol.probe import ProbeSlots
from kvconnector.protocol.repeats import Repeats

SenderMessage = Hello | Beat | SelfTest | Start | Watermark | Commit | Quiet | Digests


class ReceiveMachine:
    """Decides which messages and events a decode node's end sends and reports; a `StateMachine`.

    Args:
        own: this node's peer info.
        make_peers: makes the table of peers and their states.

    Attributes:
        grants: the Grant messages that are repeated until their transfers have committed or ended.
    """

    def __init__(self, own: PeerInfo, make_peers: Callable[..., Peers] = Peers) -> None:
        self._own = own
        self._turn = Turn()
        self.grants = Repeats()
        self.peers = make_peers(self._turn, own, greets=False, is_receiving=self.grants.has_peer)
        self._slots = ProbeSlots(self._turn, own, self.peers)
        self._dead_peers = DeadPeers()
        self._num_read_rounds = 0  # number of rounds in which messages were read from the transport

    def handle_input(self, item: Input, now: float) -> list[Action]:
        self._turn.now = now
        if isinstance(item, SenderMessage):
            self._handle_message(item)
        else:
            self._handle_wish_or_result(item)
        return self._turn.pop_actions()

    def tick(self, now: float) -> list[Action]:
        self._turn.now = now
        self._num_read_rounds += 1
        self.peers.tick()
        for engine_id in self._dead_peers.take_drained(now, self._num_read_rounds):
            self._report(TransferEventKind.PEER_DRAINED, engine_id)
        # If the sender has ended the transfer and this message was lost, the sender answers a
        # repeated Grant with Quiet.
        for _, grant in self.grants.take_due(now):
            self.peers.send(grant.engine_id, grant.message)
        self._slots.tick()
        return self._turn.pop_actions()

    @property
    def is_expecting(self) -> bool:
        """Return False: the node tells the I/O loop when KV may come (`IoLoop.expect`)."""
        return False

    @property
    def is_moving(self) -> bool:
        """Return whether a peer may be writing a probe, for which the I/O loop must poll fast."""
        return self._slots.is_lent

    # ------------------------------------------------------------------ the node's wishes

    def _handle_wish_or_result(self, item: Input) -> None:
        """Handle a wish of the node, or the result of an action."""
        match item:
            case ReadFailed():
                self._num_read_rounds -= 1
            case KVReservation():
                self._grant(item)
            case Drop():
                self._drop(item)
            case Drain(engine_id=engine_id):
                self._dead_peers.add_dead_peer(engine_id, self._turn.now, self._num_read_rounds)
            case Leave(engine_id=engine_id):
                self.grants.remove_peer(engine_id)
                self._slots.forget(engine_id)
                self.peers.remove(engine_id)
            case SendEnded(action=send):
                if item.is_queue_full and isinstance(send.message, Grant):
                    key = (send.message.request_id, send.message.epoch)
                    self.grants.retry(key, send.engine_id, self._turn.now)
                elif item.problem:
                    self.peers.send_again(item)
                else:  # a Beat
                    self.peers.confirm(send.engine_id)
            case SlotRead():
                self._slots.check_slot(item)
            case Forbidden(action=forbid):
                # The transport drops late writes from now on, so this end need not wait for the
                # sender's Quiet.
                self._report(TransferEventKind.FAILED, forbid.engine_id, forbid.key)
            case Meet(peer=peer):
                self.peers.meet(peer)
            case ConnectEnded():
                self.peers.take_connected(item)
            case _:  # other inputs are for senders only
                pass

    def _grant(self, reservation: KVReservation) -> None:
        message = Grant(
            engine_id=self._own.engine_id,
            request_id=reservation.request_id,
            epoch=reservation.epoch,
            block_ids=list(reservation.block_ids),
            first_block=reservation.first_block,
        )
        key, engine_id = (reservation.request_id, reservation.epoch), reservation.engine_id
        self._turn.add_action(Allow(engine_id, key, reservation.block_ids))
        self.grants.add_message(key, engine_id, message, self._turn.now)
        self.peers.send(engine_id, message)

    def _drop(self, wish: Drop) -> None:
        request_id, epoch = wish.key
        self.grants.remove(wish.key, wish.engine_id)
        cancel = Cancel(engine_id=self._own.engine_id, request_id=request_id, epoch=epoch)
        self.peers.send(wish.engine_id, cancel)
        self._turn.add_action(Forbid(wish.engine_id, wish.key, wants_result=True))

    # ------------------------------------------------------------------ peers' messages

    def _handle_message(self, message: SenderMessage) -> None:
        peer_id = message.engine_id
        self.peers.note_alive(peer_id, self._turn.now)
        match message:
            case Hello():
                self._answer_hello(message)
            case Beat():
                self._answer_beat(message)
            case SelfTest():
                self._slots.read_slot(message)
            case Start():
                key = (message.request_id, message.epoch)
                self._report(TransferEventKind.STARTED, peer_id, key, num_tokens=message.num_tokens)
            case Watermark():
                key = (message.request_id, message.epoch)
                self.grants.put_off(key, peer_id, self._turn.now)
                self._report(
                    TransferEventKind.WATERMARK, peer_id, key, num_tokens=message.num_tokens
                )
            case Commit():
                key = (message.request_id, message.epoch)
                self._end(key, peer_id)
                if message.record.version == HANDOFF_VERSION:
                    self._report_commit(message)
                else:
                    reason = (
                        f"the hand-off record has version {message.record.version}, "
                        f"not {HANDOFF_VERSION}"
                    )
                    self._report(TransferEventKind.FAILED, peer_id, key, reason=reason)
            case Quiet():
                key = (message.request_id, message.epoch)
                self._end(key, peer_id)
                self._report(TransferEventKind.FAILED, peer_id, key, reason=message.reason)
            # Here, digests only prove that the peer is alive; `digests.py` compares digests with
            # this node's memory.
            case Digests():
                pass

    def _end(self, key: TransferKey, engine_id: str) -> None:
        self.grants.remove(key, engine_id)
        self._turn.add_action(Forbid(engine_id, key))

    def _answer_beat(self, message: Beat) -> None:
        """Answer a probed peer's Beat; ignore other peers' Beats, so that they send Hello."""
        if self.peers[message.engine_id].is_probed:
            beat = Beat(engine_id=self._own.engine_id, sent_at_s=message.sent_at_s)
            self.peers.send(message.engine_id, beat, wants_result=True)

    def _answer_hello(self, hello: Hello) -> None:
        ack = HelloAck(
            engine_id=self._own.engine_id,
            sent_at_s=hello.sent_at_s,
            test=hello.test,
            slot=self._slots.offer(hello.engine_id, hello.test),
        )
        self.peers.send(hello.engine_id, ack)

    # ------------------------------------------------------------------ the node's events

    def _report(
        self,
        kind: TransferEventKind,
        engine_id: str,
        key: TransferKey = NO_TRANSFER,
        *,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        self._turn.add_action(
            TransferEvent(
                kind=kind,
                engine_id=engine_id,
                request_id=key[0],
                epoch=key[1],
                num_tokens=num_tokens,
                reason=reason,
            )
        )

    def _report_commit(self, commit: Commit) -> None:
        self._turn.add_action(
            TransferEvent(
                kind=TransferEventKind.COMMITTED,
                engine_id=commit.engine_id,
                request_id=commit.request_id,
                epoch=commit.epoch,
                num_tokens=commit.record.num_tokens,
                record=commit.record,
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
