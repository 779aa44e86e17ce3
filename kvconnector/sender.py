"""Sender: the prefill node's end of the handoff, over any transport.

    STARTED -> (granted) PUSHING -> COMMITTED
        `--------------------`----> FAILED          terminal only when the wire is quiet

The node's thread leaves calls; everything else here runs on the I/O thread, so that a grant or a
finished write never waits for the node's current step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import TransferError
from kvconnector.base import (
    BlockPush,
    KVTransport,
    PendingWrite,
    TransferEvent,
    TransferEventKind,
)
from kvconnector.endpoint import Endpoint
from kvconnector.layout import check_block_ids
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

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.05
HELLO_TIMEOUT_S = 10.0  # then it is reported, and greeted less often
SLOW_HELLO_INTERVAL_S = 1.0
# One write is at most this long, so that aborts and other requests never wait for much.
WRITE_BYTES = 8 * 2**20
IN_FLIGHT_BYTES_PER_PEER = 32 * 2**20


@dataclass(slots=True)
class _Write:
    """One posted piece; ``watermark`` is set on the last piece of a push."""

    pending: PendingWrite
    num_bytes: int
    watermark: int | None


@dataclass(slots=True)
class _Transfer:
    """One request's way to its decode node."""

    request_id: str
    epoch: int
    engine_id: str
    num_blocks: int
    granted: Grant | None = None
    pieces: deque[BlockPush] = field(default_factory=deque)  # computed, not yet posted
    writes: deque[_Write] = field(default_factory=deque)  # posted, not yet complete
    last: BlockPush | None = None
    last_at: float = 0.0
    num_blocks_pushed: int = 0
    failure: str | None = None


@dataclass(slots=True)
class _Greeting:
    """A peer that has not answered yet: reported at ``report_at``, asked again for ever."""

    report_at: float
    next_at: float = 0.0
    late: bool = False


class Sender:
    """See `KVSender` for the contract.

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
        self._transfers: dict[tuple[str, int], _Transfer] = {}  # (request_id, epoch)
        self._greeting: dict[str, _Greeting] = {}  # peers that have not answered yet
        self._leaving: set[str] = set()  # peers to forget when nothing is in flight to them
        self._endpoint = Endpoint(
            transport,
            on_message=self._on_message,
            progress=self._progress,
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
        self._endpoint.submit(lambda: self._connect(peer))

    def disconnect(self, engine_id: str) -> None:
        self._endpoint.submit(lambda: self._disconnect(engine_id, "the decode node is gone"))

    def start(
        self, request_id: str, epoch: int, engine_id: str, *, num_tokens: int, num_blocks: int
    ) -> None:
        transfer = _Transfer(request_id, epoch, engine_id, num_blocks)
        self._endpoint.submit(lambda: self._start(transfer, num_tokens))

    def push(self, push: BlockPush) -> None:
        now = time.perf_counter()
        self._endpoint.submit(lambda: self._push(push, now))

    def abort(self, request_id: str, epoch: int, reason: str) -> None:
        self._endpoint.submit(lambda: self._fail(self._transfers.get((request_id, epoch)), reason))

    def poll(self) -> list[TransferEvent]:
        return self._endpoint.poll()

    def close(self) -> None:
        self._endpoint.close()

    # ------------------------------------------------------------------ calls, on the I/O thread

    def _connect(self, peer: PeerInfo) -> None:
        self._leaving.discard(peer.engine_id)
        self._endpoint.add_peer(peer)
        if peer.engine_id in self._endpoint.peers:
            self._greeting[peer.engine_id] = _Greeting(time.monotonic() + HELLO_TIMEOUT_S)

    def _disconnect(self, engine_id: str, reason: str) -> None:
        """Fail what goes to a peer, and forget it as soon as nothing is in flight to it.

        Its router has lost it, which does not mean that it is dead: what was posted may still land
        there, and only then may it be told that the wire is quiet.
        """
        self._greeting.pop(engine_id, None)
        for transfer in list(self._transfers.values()):
            if transfer.engine_id == engine_id:
                self._fail(transfer, reason)
                self._finish_if_quiet(transfer)
        self._leaving.add(engine_id)

    def _forget_leaving(self) -> None:
        busy = {transfer.engine_id for transfer in self._transfers.values()}
        for engine_id in self._leaving - busy:
            self._leaving.discard(engine_id)
            self._endpoint.remove_peer(engine_id)

    def _start(self, transfer: _Transfer, num_tokens: int) -> None:
        engine_id = transfer.engine_id
        self._transfers[transfer.request_id, transfer.epoch] = transfer
        message = Start(
            engine_id=self._info.engine_id,
            request_id=transfer.request_id,
            epoch=transfer.epoch,
            num_tokens=num_tokens,
        )
        if engine_id in self._leaving or not self._send(engine_id, message):
            self._fail(transfer, "the decode node cannot be reached")

    def _push(self, push: BlockPush, now: float) -> None:
        transfer = self._transfers.get((push.request_id, push.epoch))
        if transfer is None or transfer.failure is not None:
            return
        if push.token_id is not None:
            transfer.last, transfer.last_at = push, now
        blocks_per_write = max(1, WRITE_BYTES // self._info.block_bytes)
        for index in range(0, len(push.block_ids), blocks_per_write):
            block_ids = push.block_ids[index : index + blocks_per_write]
            is_last_piece = index + blocks_per_write >= len(push.block_ids)
            transfer.pieces.append(
                BlockPush(
                    request_id=push.request_id,
                    epoch=push.epoch,
                    first_block=push.first_block + index,
                    block_ids=block_ids,
                    num_tokens=push.num_tokens if is_last_piece else 0,
                )
            )

    # ------------------------------------------------------------------ messages

    def _on_message(self, message: Message) -> None:
        if isinstance(message, HelloAck):
            if self._greeting.pop(message.engine_id, None) is not None:
                self._endpoint.emit(
                    TransferEvent(
                        kind=TransferEventKind.PEER_CONNECTED,
                        engine_id=message.engine_id,
                        transport=self._endpoint.paths[message.engine_id],
                    )
                )
        elif isinstance(message, Grant | Cancel):
            transfer = self._transfers.get((message.request_id, message.epoch))
            if transfer is None:
                # Already over here: say so again, the peer may hold blocks for it.
                self._say_quiet(message.engine_id, message.request_id, message.epoch, "unknown")
            elif transfer.engine_id != message.engine_id:
                logger.warning("dropped a message about another node's transfer")
            elif isinstance(message, Cancel):
                self._fail(transfer, "")  # why, the decode node knows
            else:
                self._take_grant(transfer, message)

    def _take_grant(self, transfer: _Transfer, grant: Grant) -> None:
        try:
            check_block_ids(grant.block_ids, self._endpoint.peers[transfer.engine_id].num_blocks)
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
        self._greet()
        in_flight_bytes: dict[str, int] = {}
        for transfer in list(self._transfers.values()):
            self._settle(transfer)
            posted = sum(write.num_bytes for write in transfer.writes)
            used = in_flight_bytes.get(transfer.engine_id, 0) + posted
            used += self._post(transfer, IN_FLIGHT_BYTES_PER_PEER - used)
            in_flight_bytes[transfer.engine_id] = used
            self._finish_if_quiet(transfer)
        if self._leaving:
            self._forget_leaving()
        new = any(not greeting.late for greeting in self._greeting.values())
        self._endpoint.expect(new or bool(self._transfers))
        return any(t.writes or (t.pieces and t.granted) for t in self._transfers.values())

    def _greet(self) -> None:
        now = time.monotonic()
        for engine_id, greeting in self._greeting.items():
            if now < greeting.next_at:
                continue
            greeting.next_at = now + (SLOW_HELLO_INTERVAL_S if greeting.late else HELLO_INTERVAL_S)
            self._endpoint.send(engine_id, Hello(engine_id=self._info.engine_id))
            if now > greeting.report_at and not greeting.late:
                greeting.late = True
                self._endpoint.fail_peer(engine_id, f"no answer in {HELLO_TIMEOUT_S:.0f} s")

    def _send(self, engine_id: str, message: Message) -> bool:
        """Send a message; when the peer cannot be reached, say so once and greet it again."""
        if self._endpoint.send(engine_id, message):
            return True
        if engine_id in self._endpoint.peers and engine_id not in self._greeting:
            self._greeting[engine_id] = _Greeting(time.monotonic(), late=True)
            self._endpoint.fail_peer(engine_id, "it cannot be reached")
        return False

    def _post(self, transfer: _Transfer, room_bytes: int) -> int:
        """Post what is computed and granted; returns the bytes posted."""
        posted = 0
        while (
            transfer.granted is not None
            and transfer.failure is None
            and transfer.pieces
            and posted < room_bytes
        ):
            piece = transfer.pieces.popleft()
            grant = transfer.granted
            start = max(piece.first_block - grant.first_block, 0)
            end = piece.first_block - grant.first_block + len(piece.block_ids)
            if end <= start:  # the peer has these
                continue
            local = piece.block_ids[start - end :]
            try:
                pending = self._endpoint.transport.write(
                    transfer.engine_id, local, grant.block_ids[start:end]
                )
            except (TransferError, ValueError) as error:
                self._fail(transfer, str(error))
                break
            num_bytes = len(local) * self._info.block_bytes
            transfer.writes.append(_Write(pending, num_bytes, piece.num_tokens or None))
            transfer.num_blocks_pushed += len(local)
            posted += num_bytes
            self._settle(transfer)
        return posted

    def _settle(self, transfer: _Transfer) -> None:
        """Take complete writes off, in order, and tell the watermark."""
        while transfer.writes:
            write = transfer.writes[0]
            try:
                if not write.pending.is_done():
                    return
            except TransferError as error:
                self._fail(transfer, str(error))
            transfer.writes.popleft()
            # After the last push the commit record follows and says more.
            if write.watermark is not None and transfer.failure is None and not transfer.last:
                self._send(
                    transfer.engine_id,
                    Watermark(
                        engine_id=self._info.engine_id,
                        request_id=transfer.request_id,
                        epoch=transfer.epoch,
                        num_tokens=write.watermark,
                    ),
                )

    def _finish_if_quiet(self, transfer: _Transfer) -> None:
        key = (transfer.request_id, transfer.epoch)
        if transfer.writes or key not in self._transfers:
            return
        if transfer.failure is not None:
            del self._transfers[key]
            self._say_quiet(
                transfer.engine_id, transfer.request_id, transfer.epoch, transfer.failure
            )
            self._emit(TransferEventKind.FAILED, transfer, reason=transfer.failure)
        elif transfer.last is not None and transfer.granted is not None and not transfer.pieces:
            self._commit(transfer, transfer.last)

    def _commit(self, transfer: _Transfer, last: BlockPush) -> None:
        assert last.token_id is not None
        commit = Commit(
            engine_id=self._info.engine_id,
            request_id=transfer.request_id,
            epoch=transfer.epoch,
            token_id=last.token_id,
            num_tokens=last.num_tokens,
            num_bytes=transfer.num_blocks_pushed * self._info.block_bytes,
            num_blocks=transfer.num_blocks_pushed,
            transport=self._endpoint.paths[transfer.engine_id],
            exposed_transfer_s=time.perf_counter() - transfer.last_at,
        )
        if not self._send(transfer.engine_id, commit):
            self._fail(transfer, "the decode node cannot be reached")
            self._finish_if_quiet(transfer)
            return
        del self._transfers[transfer.request_id, transfer.epoch]
        self._emit(TransferEventKind.COMMITTED, transfer)

    def _fail(self, transfer: _Transfer | None, reason: str) -> None:
        """Post nothing more; `_finish_if_quiet` ends it when nothing is in flight."""
        if transfer is None or transfer.failure is not None:
            return
        transfer.failure = reason
        transfer.pieces.clear()

    def _say_quiet(self, engine_id: str, request_id: str, epoch: int, reason: str) -> None:
        quiet = Quiet(
            engine_id=self._info.engine_id, request_id=request_id, epoch=epoch, reason=reason
        )
        self._send(engine_id, quiet)

    def _emit(self, kind: TransferEventKind, transfer: _Transfer, *, reason: str = "") -> None:
        self._endpoint.emit(
            TransferEvent(
                kind=kind,
                engine_id=transfer.engine_id,
                request_id=transfer.request_id,
                epoch=transfer.epoch,
                reason=reason,
            )
        )
