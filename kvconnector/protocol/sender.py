"""SendMachine: the prefill node's end of the hand-off, without I/O.

    STARTED -> (granted) PUSHING -> COMMITTED
         `--------------------`----> FAILED

A transfer becomes COMMITTED or FAILED only when none of its writes is in flight. Refuses to know:
transports, threads, how the decode node verifies blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from kvconnector.base import Portions, PushTotals, TransferEvent, TransferEventKind, TransferKey
from kvconnector.blocks import LayerRange, Slices, check_block_ids
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.actions import (
    Abort,
    Action,
    Begin,
    ConnectEnded,
    Input,
    Leave,
    Meet,
    Pause,
    PauseEnded,
    Posted,
    ProbePosted,
    Push,
    SendEnded,
    Turn,
    Write,
    WriteEnded,
)
from kvconnector.protocol.messages import (
    MAX_TEXT_CHARS,
    Beat,
    Cancel,
    Commit,
    Grant,
    HelloAck,
    Message,
    Quiet,
    Resend,
    SelfTestResult,
    Start,
    Verified,
    Watermark,
)
from kvconnector.protocol.peers import Peers, PeerState
from kvconnector.protocol.probe import Probes
from kvconnector.protocol.repeats import Repeats
from kvconnector.protocol.transfer import QueuedPush, Transfer

logger = logging.getLogger(__name__)

UNREACHED = "the decode node cannot be reached"


class SendMachine:
    """Decides what a prefill node's end sends, writes and reports; a `StateMachine`.

    Args:
        own: this node's peer info.
        digest: digest of the pattern that probes write.
        portions: limits on the bytes posted at once.
        is_verified: whether transfers stay open after their commit until the decode node has
            verified the blocks (`digests.py`).
        make_peers: makes the table of peers and their states.

    Attributes:
        transfers: the open transfers, by request id and epoch.
        repeats: the messages that are repeated: Start until it is granted, and Commit until all
            blocks are verified.
        totals: counts of all posted blocks, bytes and memory ranges, for the metrics.
    """

    def __init__(
        self,
        own: PeerInfo,
        digest: bytes,
        portions: Portions,
        *,
        is_verified: bool = False,
        make_peers: Callable[..., Peers] = Peers,
    ) -> None:
        self._own = own
        self._num_layers = own.manifest.layers_per_unit
        # Slices by the peer's engine id; kept while transfers to the peer are open
        self._slices: dict[str, Slices] = {}
        self._portions = portions
        self._is_verified = is_verified
        self._turn = Turn()
        self.peers = make_peers(
            *(self._turn, own),
            greets=True,
            is_busy=self._has_writes,
            is_used=lambda peer: any(t.engine_id == peer for t in self.transfers.values()),
            on_lost=self._fail_all,
        )
        self._probes = Probes(self._turn, own, self.peers, digest)
        self.transfers: dict[TransferKey, Transfer] = {}
        self.repeats = Repeats()
        self.totals = PushTotals()
        # Transfers whose pieces may still be posted in this round
        self._to_post: deque[Transfer] = deque()
        # Bytes that may still be posted to each peer in this round
        self._room_bytes: dict[str, int] = {}

    def handle_input(self, item: Input, now: float) -> list[Action]:
        self._turn.now = now
        match item:
            case PauseEnded():
                self._post_next()
            case Push():
                self._push(item)
            case Posted():
                self._on_posted(item)
            case WriteEnded():
                self._on_write_ended(item)
            case Beat() | HelloAck():
                self.peers.renew(item.engine_id, item.sent_at_s)
                if isinstance(item, HelloAck):
                    self._probes.start_on_ack(item)
            case SelfTestResult():
                self.peers.note_alive(item.engine_id, item.sent_at_s)
                self._probes.on_result(item)
            case Grant() | Cancel() | Resend() | Verified():
                self._handle_message(item)
            case Begin():
                self._begin(item)
            case Abort(key=key, reason=reason):
                self._fail(self.transfers.get(key), reason)
            case Leave(engine_id=engine_id):
                self._leave(engine_id)
            case ProbePosted():
                self._probes.take_posted(item)
            case SendEnded():
                self._on_send_ended(item)
            case Meet(peer=peer):
                self.peers.meet(peer)
            case ConnectEnded(action=connect):
                self.peers.take_connected(item)
                if item.problem and connect.then is not None:
                    self._give_up(connect.then.message)
            case _:  # other inputs are for receivers
                pass
        return self._turn.pop_actions()

    def tick(self, now: float) -> list[Action]:
        self._turn.now = now
        self.peers.tick()
        self._probes.tick()
        self._repeat()
        self._begin_round()
        self._forget_leaving()
        return self._turn.pop_actions()

    @property
    def is_expecting(self) -> bool:
        """Return whether messages may arrive soon."""
        return bool(self.transfers) or bool(self._probes) or self.peers.is_meeting

    @property
    def is_moving(self) -> bool:
        """Return whether bytes are in flight or wait to be posted."""
        granted = (t for t in self.transfers.values() if t.granted is not None)
        return self._probes.is_writing or any(t.writes or t.pushes for t in granted)

    # ------------------------------------------------------------------ inputs

    def _begin(self, wish: Begin) -> None:
        (request_id, epoch), engine_id = wish.key, wish.engine_id
        transfer = Transfer(
            request_id, epoch, engine_id, wish.num_blocks, self.totals, groups=wish.groups
        )
        self.transfers[wish.key] = transfer
        message = Start(
            engine_id=self._own.engine_id,
            request_id=request_id,
            epoch=epoch,
            num_tokens=wish.num_tokens,
        )
        if not self.peers.may_start(engine_id) or not self.peers.send(engine_id, message):
            self._fail(transfer, UNREACHED)
        self.repeats.add_message(wish.key, engine_id, message, self._turn.now)

    def _push(self, wish: Push) -> None:
        push = wish.push
        transfer = self.transfers.get((push.request_id, push.epoch))
        if transfer is None or transfer.failure is not None:
            return
        if push.record is not None:
            transfer.record, transfer.last_push_at = push.record, wish.at_s
        if push.block_ids:
            transfer.pushes.append(QueuedPush.of(push))

    def _leave(self, engine_id: str) -> None:
        """Fail a peer's transfers; each ends once none of its writes is in flight.

        The router has lost the peer, but the peer may be alive, and posted writes may still reach
        its memory. So Quiet is sent only after a transfer's last write.
        """
        self.peers.leave(engine_id)
        self._fail_all(engine_id, "the decode node is gone")
        for transfer in list(self.transfers.values()):
            self._finish_if_quiet(transfer)

    def _handle_message(self, message: Grant | Cancel | Resend | Verified) -> None:
        transfer = self.transfers.get((message.request_id, message.epoch))
        if transfer is None:
            # This end has ended the transfer. Quiet is sent again, because the peer may still keep
            # blocks for the transfer.
            self._send_quiet(message.engine_id, message.request_id, message.epoch, "unknown")
        elif transfer.engine_id != message.engine_id:
            logger.warning("dropped a message about another node's transfer")
        elif isinstance(message, Cancel):
            self._fail(transfer, "")  # no reason is reported: the decode node itself cancelled
        elif isinstance(message, Resend):
            self._send_again(transfer, message)
        elif isinstance(message, Verified):
            if transfer.commit_is_sent and transfer.is_complete:
                self._end(transfer)
        else:
            self._on_grant(transfer, message)

    def _send_again(self, transfer: Transfer, message: Resend) -> None:
        layers = message.layers
        if self._is_verified and 0 <= layers[0] < layers[1] <= self._num_layers:
            transfer.send_again(message.indices, layers, message.attempt)
            key = (message.request_id, message.epoch)
            self.repeats.put_off(key, message.engine_id, self._turn.now)
        else:
            transfer.fail("bad request to resend: digests are off, or the layers are unknown")

    def _on_grant(self, transfer: Transfer, grant: Grant) -> None:
        try:
            check_block_ids(grant.block_ids, self.peers[transfer.engine_id].info.num_blocks)
        except ValueError as error:
            self._fail(transfer, f"bad grant: {error}")
            return
        if grant.first_block + len(grant.block_ids) != transfer.num_blocks:
            self._fail(
                transfer,
                f"bad grant: {grant.first_block} + {len(grant.block_ids)} blocks, "
                f"wanted {transfer.num_blocks}",
            )
        elif transfer.granted is None:
            transfer.granted = grant

    def _on_send_ended(self, result: SendEnded) -> None:
        message = result.action.message
        if not result.problem:  # only a Commit without digests wants a result
            assert isinstance(message, Commit)
            self._end(self.transfers.get((message.request_id, message.epoch)))
        elif not self.peers.send_again(result):
            self._give_up(message)

    def _give_up(self, message: Message) -> None:
        """Fail a transfer whose Start or Commit message cannot be sent; ignore other messages."""
        if isinstance(message, Start | Commit):
            transfer = self.transfers.get((message.request_id, message.epoch))
            self._fail(transfer, UNREACHED)
            if transfer is not None:
                self._finish_if_quiet(transfer)

    # ------------------------------------------------------------------ writing

    def _begin_round(self) -> None:
        """Refill each peer's byte budget.

        Then post computed and granted pieces of all open transfers, one transfer after another.
        """
        if not self.transfers:
            return
        self._room_bytes.clear()
        for transfer in self.transfers.values():
            peer_id = transfer.engine_id
            limit = self.peers.limit_bytes(peer_id, self._portions.in_flight_bytes)
            sizes = [self._num_bytes(peer_id, len(p.block_ids), p.layers) for p in transfer.writes]
            self._room_bytes[peer_id] = self._room_bytes.get(peer_id, limit) - sum(sizes)
        self._to_post = deque(self.transfers.values())
        self._turn.add_action(Pause())  # `_post_next` runs after this action

    def _post_next(self) -> None:
        """Post this round's next piece that may go; end transfers with nothing left to post."""
        while self._to_post:
            transfer = self._to_post[0]
            write = self._next_write(transfer)
            if write is not None:
                self._turn.add_action(write)
                return
            self._to_post.popleft()
            self._finish_if_quiet(transfer)

    def _next_write(self, transfer: Transfer) -> Write | None:
        grant, engine_id = transfer.granted, transfer.engine_id
        # The lease is checked before each post, because this process may have been stopped since
        # the last post.
        while (
            self._room_bytes[engine_id] > 0
            and transfer.can_post
            and self.peers.may_write(engine_id)
        ):
            assert grant is not None
            piece = transfer.next_piece(self._num_next_blocks(transfer))
            piece = piece.from_index(grant.first_block)
            if piece.indices:  # the decode node already has the blocks before ``first_block``
                remote = [grant.block_ids[index - grant.first_block] for index in piece.indices]
                key = transfer.request_id, transfer.epoch
                return Write(engine_id, key, piece, remote, transfer.groups_of(piece))
        return None

    def _num_next_blocks(self, transfer: Transfer) -> int:
        """Return how many blocks of a transfer's next push one write may have, at least 1.

        The number follows the latest bandwidth, so that a long push gets larger pieces as soon as
        the link is known to be faster.
        """
        engine_id, most_bytes = transfer.engine_id, self._portions.write_bytes
        block_bytes = self._num_bytes(engine_id, 1, transfer.pushes[0].whole.layers) or 1
        wanted = round(self.peers.piece_bytes(engine_id, most_bytes) / block_bytes)
        return max(1, min(wanted, most_bytes // block_bytes))

    def _on_posted(self, result: Posted) -> None:
        action = result.action
        self.peers.note_round_trip(action.engine_id, result.round_trip_s)
        transfer, piece = self.transfers[action.key], action.piece
        if result.problem:
            self._fail(transfer, result.problem)
        else:
            peer_id, remote = action.engine_id, action.remote_block_ids
            num_bytes = self._num_bytes(peer_id, len(piece.block_ids), piece.layers)
            self._room_bytes[peer_id] -= num_bytes
            num_ranges = self._slices_to(peer_id).num_ranges(piece.layers)
            transfer.note_post(
                *(piece, remote, num_bytes, result.posting_s, num_ranges, self._num_layers)
            )
            transfer.writes.append(piece)
            if result.is_done:
                self._end_oldest_write(transfer)
        self._turn.add_action(Pause())  # `_post_next` runs after this action

    def _on_write_ended(self, result: WriteEnded) -> None:
        if not result.problem:
            self.peers.note_reached(result.engine_id)
        if not result.key[0]:  # `NO_TRANSFER`: a probe's write
            self._probes.take_ended(result)
            return
        transfer = self.transfers.get(result.key)
        if transfer is None or not transfer.writes:  # an earlier transfer had the same key
            return
        if result.problem:
            self._fail(transfer, result.problem)
        self._end_oldest_write(transfer)

    def _end_oldest_write(self, transfer: Transfer) -> None:
        """Remove a transfer's oldest write, which has ended, and send its watermark."""
        watermark = transfer.writes.popleft().watermark
        # After the last push, no watermark is sent: the Commit says that all blocks are complete.
        if watermark is not None and transfer.failure is None and not transfer.record:
            self.peers.send(
                transfer.engine_id,
                Watermark(
                    engine_id=self._own.engine_id,
                    request_id=transfer.request_id,
                    epoch=transfer.epoch,
                    num_tokens=watermark[0],
                    num_blocks=watermark[1],
                ),
            )

    def _num_bytes(self, engine_id: str, num_blocks: int, layers: LayerRange | None) -> int:
        """Return the number of bytes that all ranks write for these blocks (or for some layers)."""
        return num_blocks * self._slices_to(engine_id).num_bytes(layers)

    def _slices_to(self, engine_id: str) -> Slices:
        """Return the slices of blocks that each of this node's ranks writes to a peer's ranks.

        An unknown peer is assumed to have the same layout as this node.
        """
        if engine_id not in self._slices:
            theirs = self.peers[engine_id].info if engine_id in self.peers else self._own
            self._slices[engine_id] = Slices(self._own.manifest, theirs.manifest)
        return self._slices[engine_id]

    def _has_writes(self, engine_id: str) -> bool:
        mine = (t for t in self.transfers.values() if t.engine_id == engine_id)
        return any(t.writes for t in mine) or self._probes.has_writes(engine_id)

    # ------------------------------------------------------------------ ends

    def _repeat(self) -> None:
        """Repeat the messages that were not answered in time."""
        for key, repeat in self.repeats.take_due(self._turn.now):
            transfer = self.transfers.get(key)
            if transfer is None or not transfer.waits_for_answer:
                self.repeats.remove(key, repeat.engine_id)
            # After a Resend, a new Commit follows the blocks; the old Commit is not repeated.
            elif not transfer.commit_is_sent or transfer.is_complete:
                self.peers.send(repeat.engine_id, repeat.message)

    def _finish_if_quiet(self, transfer: Transfer) -> None:
        """End a failed transfer or commit a complete transfer, unless its writes are in flight."""
        key = (transfer.request_id, transfer.epoch)
        if transfer.writes or key not in self.transfers:
            return
        if transfer.failure is not None:
            self._forget(transfer)
            self._send_quiet(transfer.engine_id, *key, transfer.failure)
            self._report(TransferEventKind.FAILED, transfer, transfer.failure)
        elif transfer.is_complete and not transfer.commit_is_sent:
            self._commit(key, transfer)

    def _commit(self, key: TransferKey, transfer: Transfer) -> None:
        engine_id = transfer.engine_id
        path = self.peers[engine_id].path
        commit = transfer.make_commit(self._own.engine_id, path, self._turn.now)
        transfer.commit_is_sent = True
        if not self.peers.send(engine_id, commit, wants_result=not self._is_verified):
            self._give_up(commit)
        elif self._is_verified:
            self.repeats.add_message(key, engine_id, commit, self._turn.now)

    def _end(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._forget(transfer)
            self._report(TransferEventKind.COMMITTED, transfer)

    def _forget(self, transfer: Transfer) -> None:
        key = (transfer.request_id, transfer.epoch)
        del self.transfers[key]
        self.repeats.remove(key, transfer.engine_id)

    def _fail(self, transfer: Transfer | None, reason: str) -> None:
        """Post no more writes of a transfer; `_finish_if_quiet` ends the transfer later.

        Args:
            transfer: the transfer to fail; None: the transfer has ended already.
        """
        if transfer is not None:
            transfer.fail(reason)

    def _fail_all(self, engine_id: str, reason: str) -> None:
        """Fail all open transfers to a peer."""
        for transfer in self.transfers.values():
            if transfer.engine_id == engine_id:
                self._fail(transfer, reason)

    def _forget_leaving(self) -> None:
        busy = {transfer.engine_id for transfer in self.transfers.values()}
        for peer_id in self._slices.keys() - busy:
            del self._slices[peer_id]
        for peer in self.peers:
            peer_id = peer.engine_id
            is_quiet = peer_id not in busy and not self._probes.has_writes(peer_id)
            if peer.state is PeerState.LEAVING and is_quiet:
                self.peers.remove(peer_id)

    def _send_quiet(self, engine_id: str, request_id: str, epoch: int, reason: str) -> None:
        quiet = Quiet(
            engine_id=self._own.engine_id,
            request_id=request_id,
            epoch=epoch,
            reason=reason[:MAX_TEXT_CHARS],
        )
        self.peers.send(engine_id, quiet)

    def _report(self, kind: TransferEventKind, transfer: Transfer, reason: str = "") -> None:
        self._turn.add_action(
            TransferEvent(
                kind=kind,
                engine_id=transfer.engine_id,
                request_id=transfer.request_id,
                epoch=transfer.epoch,
                reason=reason,
            )
        )
