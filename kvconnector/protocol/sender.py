"""Sender: the prefill node's end of the handoff, over any transport.

    STARTED -> (granted) PUSHING -> COMMITTED
        `--------------------`----> FAILED          terminal only when the wire is quiet

The node's thread leaves calls; everything else here runs on the I/O thread, so that a grant or a
finished write never waits for the node's current step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from baton.api.errors import TransferError
from baton.link.round_watch import Rounds
from baton.telemetry.node_metrics import ConnectorMetrics
from kvconnector.base import BlockPush, TransferEvent, TransferEventKind
from kvconnector.block_digests import BlockDigests
from kvconnector.blocks import LayerRange, check_block_ids
from kvconnector.endpoint import Endpoint
from kvconnector.peer_info import PeerInfo
from kvconnector.protocol.digests import SentDigests, cut_digests
from kvconnector.protocol.messages import (
    MAX_TEXT_CHARS,
    Beat,
    Cancel,
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
from kvconnector.protocol.peers import PeerState
from kvconnector.protocol.repeats import Repeats
from kvconnector.protocol.self_test import SelfTests
from kvconnector.protocol.transfer import (
    DEVICE_PORTIONS,
    HOST_PORTIONS,
    PushTotals,
    Transfer,
    Write,
    cut,
)
from kvconnector.transports.base import KVTransport

logger = logging.getLogger(__name__)


class Sender:
    """See `KVSender` for the contract.

    Args:
        transport: how bytes travel; owned from now on.
        on_event: called (on another thread) when `poll` has something.
        on_death: called (on another thread) when the connector cannot continue.
        clock: seconds that never go back.
        digests: of this node's memory, if the decode node is to check what arrives.
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
        self._transfers: dict[tuple[str, int], Transfer] = {}  # (request_id, epoch)
        self._repeats = Repeats()  # Start until it is granted, Commit until all is verified
        self._totals = PushTotals()
        self._on_device = transport.scratch.memory.is_cuda  # where the KV cache is
        self._portions = DEVICE_PORTIONS if self._on_device else HOST_PORTIONS
        self._endpoint = Endpoint(
            transport,
            on_message=self._on_message,
            progress=self._progress,
            on_event=on_event,
            on_death=on_death,
            greets=True,
            is_busy=self._has_writes,
            on_lost=self._fail_all,
            clock=clock,
        )
        self._info = self._endpoint.peer_info
        self._digests = None if digests is None else SentDigests(digests, self._info.engine_id)
        self._tests = SelfTests(transport, self._endpoint.peers, clock)
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
        self._endpoint.submit(lambda: self._disconnect(engine_id, "the decode node is gone"))

    def start(
        self, request_id: str, epoch: int, engine_id: str, *, num_tokens: int, num_blocks: int
    ) -> None:
        transfer = Transfer(request_id, epoch, engine_id, num_blocks, self._totals)
        self._endpoint.submit(lambda: self._start(transfer, num_tokens))

    def push(self, push: BlockPush) -> None:
        now = self._clock()
        self._endpoint.submit(lambda: self._push(push, now))

    def abort(self, request_id: str, epoch: int, reason: str) -> None:
        self._endpoint.submit(lambda: self._fail(self._transfers.get((request_id, epoch)), reason))

    def poll(self) -> list[TransferEvent]:
        return self._endpoint.poll()

    def metrics(self) -> ConnectorMetrics:
        return self._totals.add_to(self._endpoint.metrics())

    @property
    def rounds(self) -> Rounds:
        """Of the KV I/O thread; safe from any thread."""
        return self._endpoint.rounds

    def close(self) -> None:
        self._endpoint.close()

    # ------------------------------------------------------------------ calls, on the I/O thread

    def _disconnect(self, engine_id: str, reason: str) -> None:
        """Fail what goes to a peer, and forget it as soon as nothing is in flight to it.

        Its router has lost it, which does not mean that it is dead: what was posted may still land
        there, and only then may it be told that the wire is quiet.
        """
        self._endpoint.peers.leave(engine_id)
        self._fail_all(engine_id, reason)
        for transfer in list(self._transfers.values()):
            self._finish_if_quiet(transfer)

    def _fail_all(self, engine_id: str, reason: str) -> None:
        """Post nothing more to a peer."""
        for transfer in self._transfers.values():
            if transfer.engine_id == engine_id:
                self._fail(transfer, reason)

    def _has_writes(self, engine_id: str) -> bool:
        mine = (t for t in self._transfers.values() if t.engine_id == engine_id)
        return any(t.writes for t in mine) or self._tests.has_writes(engine_id)

    def _forget_leaving(self) -> None:
        busy = {transfer.engine_id for transfer in self._transfers.values()}
        for peer in self._endpoint.peers:
            peer_id = peer.engine_id
            is_quiet = peer_id not in busy and not self._tests.has_writes(peer_id)
            if peer.state is PeerState.LEAVING and is_quiet:
                self._endpoint.peers.remove(peer_id)

    def _start(self, transfer: Transfer, num_tokens: int) -> None:
        engine_id = transfer.engine_id
        self._transfers[transfer.request_id, transfer.epoch] = transfer
        message = Start(
            engine_id=self._info.engine_id,
            request_id=transfer.request_id,
            epoch=transfer.epoch,
            num_tokens=num_tokens,
        )
        if not self._endpoint.peers.may_start(engine_id) or not self._send(engine_id, message):
            self._fail(transfer, "the decode node cannot be reached")
        key = (transfer.request_id, transfer.epoch)
        self._repeats.add(key, engine_id, message, self._clock())

    def _push(self, push: BlockPush, now: float) -> None:
        transfer = self._transfers.get((push.request_id, push.epoch))
        if transfer is None or transfer.failure is not None:
            return
        if push.token_id is not None:
            transfer.last, transfer.last_at = push, now
        blocks_per_write = self._portions.write_bytes // max(1, self._num_bytes(1, push.layers))
        transfer.pieces += cut(push, max(1, blocks_per_write))

    # ------------------------------------------------------------------ messages

    def _on_message(self, message: Message) -> None:
        if isinstance(message, HelloAck | Beat):
            self._endpoint.peers.renew(message.engine_id, message.sent_at_s)
            if isinstance(message, HelloAck):
                self._tests.begin(message)
        elif isinstance(message, SelfTestResult):
            self._endpoint.peers.note_alive(message.engine_id, message.sent_at_s)
            self._tests.end(message)
        elif isinstance(message, Grant | Cancel | Resend | Verified):
            transfer = self._transfers.get((message.request_id, message.epoch))
            if transfer is None:
                # Already over here: say so again, the peer may hold blocks for it.
                self._say_quiet(message.engine_id, message.request_id, message.epoch, "unknown")
            elif transfer.engine_id != message.engine_id:
                logger.warning("dropped a message about another node's transfer")
            elif isinstance(message, Cancel):
                self._fail(transfer, "")  # why, the decode node knows
            elif isinstance(message, Resend):
                self._send_again(transfer, message)
            elif isinstance(message, Verified):
                if transfer.commit_is_sent and transfer.is_complete:
                    self._end(transfer)
            else:
                self._take_grant(transfer, message)

    def _send_again(self, transfer: Transfer, message: Resend) -> None:
        layers = message.layers
        if self._digests is not None and 0 <= layers[0] < layers[1] <= self._info.num_layers:
            transfer.send_again(message.indices, layers, message.attempt)
            key = (message.request_id, message.epoch)
            self._repeats.put_off(key, message.engine_id, self._clock())
        else:
            transfer.fail("the decode node asked for what there is not")

    def _take_grant(self, transfer: Transfer, grant: Grant) -> None:
        try:
            num_blocks = self._endpoint.peers[transfer.engine_id].info.num_blocks
            check_block_ids(grant.block_ids, num_blocks)
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

    # ------------------------------------------------------------------ progress

    def _progress(self) -> bool:
        is_testing = self._tests.progress()
        self._repeat()
        in_flight_bytes: dict[str, int] = {}
        for transfer in list(self._transfers.values()):
            self._settle(transfer)
            posted = sum(write.num_bytes for write in transfer.writes)
            used = in_flight_bytes.get(transfer.engine_id, 0) + posted
            used += self._post(transfer, self._portions.in_flight_bytes - used)
            in_flight_bytes[transfer.engine_id] = used
            self._finish_if_quiet(transfer)
        self._forget_leaving()
        is_meeting = self._endpoint.peers.is_meeting or bool(self._tests)
        self._endpoint.expect(is_meeting or bool(self._transfers))
        self._endpoint.hurry(self._on_device and any(in_flight_bytes.values()))
        granted = [t for t in self._transfers.values() if t.granted is not None]
        return is_testing or any(transfer.writes or transfer.pieces for transfer in granted)

    def _repeat(self) -> None:
        """Say again what is not answered: it was lost, or its answer was."""
        for key, repeat in self._repeats.take_due(self._clock()):
            transfer = self._transfers.get(key)
            if transfer is None or not transfer.waits_for_answer:
                self._repeats.remove(key, repeat.engine_id)
            elif not transfer.commit_is_sent or transfer.is_complete:  # else it speaks soon
                self._send(repeat.engine_id, repeat.message)

    def _send(self, engine_id: str, message: Message) -> bool:
        return self._endpoint.peers.send(engine_id, message)

    def _post(self, transfer: Transfer, room_bytes: int) -> int:
        """Post what is computed and granted; returns the bytes posted."""
        posted = 0
        # Asked before each post: this process may have stood still since the last one.
        may_write = self._endpoint.peers.may_write
        while posted < room_bytes and transfer.can_post and may_write(transfer.engine_id):
            grant = transfer.granted
            assert grant is not None
            piece = transfer.pieces.popleft().from_place(grant.first_block)
            if not piece.indices:  # the decode node has these
                continue
            remote = [grant.block_ids[index - grant.first_block] for index in piece.indices]
            digests = None
            if self._digests is not None:
                key = self._endpoint.peers.channels[transfer.engine_id].keys.send_blocks
                digests = self._digests.of(transfer.request_id, transfer.epoch, piece, key)
            started = self._clock()
            try:
                pending = self._endpoint.transport.write(
                    transfer.engine_id,
                    piece.block_ids,
                    remote,
                    piece.layers,
                    (transfer.request_id, transfer.epoch),
                )
            except (TransferError, ValueError) as error:
                self._fail(transfer, str(error))
                break
            posting_s = self._clock() - started
            num_bytes = self._num_bytes(len(remote), piece.layers)
            transfer.post(Write(pending, piece, num_bytes, digests), remote, posting_s)
            posted += num_bytes
            self._settle(transfer)
        return posted

    def _num_bytes(self, num_blocks: int, layers: LayerRange | None) -> int:
        num_bytes = num_blocks * self._info.block_bytes
        if layers is None:
            return num_bytes
        return num_bytes * (layers[1] - layers[0]) // self._info.num_layers

    def _settle(self, transfer: Transfer) -> None:
        """Take complete writes off, in order, and tell the watermark."""
        while transfer.writes:
            write = transfer.writes[0]
            try:
                if not write.pending.is_done():
                    return
            except TransferError as error:
                self._fail(transfer, str(error))
            transfer.writes.popleft()
            self._send_digests(transfer, write)
            # After the last push the commit record follows and says more.
            watermark = write.piece.watermark
            if watermark is not None and transfer.failure is None and not transfer.last:
                self._send(
                    transfer.engine_id,
                    Watermark(
                        engine_id=self._info.engine_id,
                        request_id=transfer.request_id,
                        epoch=transfer.epoch,
                        num_tokens=watermark[0],
                        num_blocks=watermark[1],
                    ),
                )

    def _finish_if_quiet(self, transfer: Transfer) -> None:
        key = (transfer.request_id, transfer.epoch)
        if transfer.writes or key not in self._transfers:
            return
        if transfer.failure is not None:
            del self._transfers[key]
            self._say_quiet(
                transfer.engine_id, transfer.request_id, transfer.epoch, transfer.failure
            )
            self._emit(TransferEventKind.FAILED, transfer, reason=transfer.failure)
        elif transfer.is_complete and not transfer.commit_is_sent:
            self._commit(transfer)

    def _commit(self, transfer: Transfer) -> None:
        path = self._endpoint.peers[transfer.engine_id].path
        commit = transfer.commit_record(self._info.engine_id, path, self._clock())
        if not self._send(transfer.engine_id, commit):
            self._fail(transfer, "the decode node cannot be reached")
            self._finish_if_quiet(transfer)
            return
        transfer.commit_is_sent = True
        if self._digests is None:
            self._end(transfer)
        else:
            key = (transfer.request_id, transfer.epoch)
            self._repeats.add(key, transfer.engine_id, commit, self._clock())

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.request_id, transfer.epoch]
        self._emit(TransferEventKind.COMMITTED, transfer)

    def _send_digests(self, transfer: Transfer, write: Write) -> None:
        """Say what a complete write must have brought; in messages that stay short."""
        if write.digests is not None and transfer.failure is None:
            for message in cut_digests(write.digests):
                self._send(transfer.engine_id, message)

    def _fail(self, transfer: Transfer | None, reason: str) -> None:
        """Post nothing more; `_finish_if_quiet` ends it when nothing is in flight."""
        if transfer is not None:
            transfer.fail(reason)

    def _say_quiet(self, engine_id: str, request_id: str, epoch: int, reason: str) -> None:
        quiet = Quiet(
            engine_id=self._info.engine_id,
            request_id=request_id,
            epoch=epoch,
            reason=reason[:MAX_TEXT_CHARS],
        )
        self._send(engine_id, quiet)

    def _emit(self, kind: TransferEventKind, transfer: Transfer, *, reason: str = "") -> None:
        self._endpoint.emit(
            TransferEvent(
                kind=kind,
                engine_id=transfer.engine_id,
                request_id=transfer.request_id,
                epoch=transfer.epoch,
                reason=reason,
            )
        )
