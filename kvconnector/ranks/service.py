"""RankService: serves one rank's transport on a separate thread of the rank's process.

    commands of the leading process -> post, connect, digest     each ended write is reported

The service also calls the transport regularly, because the transport may have to read peers' writes
from sockets. The leading process makes all decisions.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from multiprocessing.connection import Connection

import msgspec

from baton.api.errors import TransferError
from baton.kv.block_key import BlockKey
from kvconnector import KV_CONNECTORS
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.block_digests import BlockDigests
from kvconnector.blocks import Slices
from kvconnector.layout import KVMemory
from kvconnector.peer_info import PeerInfo, host_identity
from kvconnector.peer_process import start_time
from kvconnector.ranks.messages import (
    ENCODER,
    OPEN,
    TO_RANK,
    Answer,
    Call,
    DigestSlices,
    DigestSlot,
    Ended,
    Forget,
    FromRank,
    Learn,
    LendSlot,
    Open,
    Permit,
    Prohibit,
    Ready,
    ToRank,
    WriteBlocks,
    WriteSlot,
)
from kvconnector.ranks.more_links import connect_rank
from kvconnector.transports.base import KVTransport, PendingWrite

logger = logging.getLogger(__name__)

IN_FLIGHT_POLL_S = 0.0001
EXPECTING_POLL_S = 0.001
IDLE_POLL_S = 0.025
MAX_READ_FAILURES = 100  # consecutive failed reads after which the transport counts as broken
_SELECTABLE = 1024  # `select` accepts only file descriptors below this number
_WARM_S = 2.0  # seconds of fast polling after a command


def open_transport(start: Open, memory: KVMemory) -> KVTransport:
    """Open the transport of one rank, over this rank's memory."""
    return KV_CONNECTORS.load(start.connector)(start.engine_id, memory)


def serve(connection: Connection, memory: KVMemory, argument: bytes) -> None:
    """Serve this rank's transport until the leading process closes the connection.

    Args:
        connection: the rank's first connection; unused if the message names a socket.
        memory: this rank's KV memory.
        argument: an encoded `Open` message.
    """
    start = OPEN.decode(argument)
    if start.address:
        connection = connect_rank(start.address, memory.rank)
    transport = open_transport(start, memory)
    try:
        RankService(connection, memory, transport).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the node has ended
    finally:
        transport.close()


class RankService:
    """Carries out the leading process's commands on one rank's transport, on one thread.

    Args:
        connection: connection to the leading process.
        memory: this rank's KV memory.
        transport: this rank's transport, which uses that memory.
    """

    def __init__(self, connection: Connection, memory: KVMemory, transport: KVTransport) -> None:
        self._connection = connection
        self._memory = memory
        self._transport = transport
        self._digests = BlockDigests(memory)
        self._peers: dict[str, PeerInfo] = {}
        self._writes: deque[tuple[int, PendingWrite]] = deque()
        self._permitted: set[tuple[str, TransferKey]] = set()
        self._warm_until = 0.0
        self._num_failures = 0
        info = transport.peer_info
        place = msgspec.structs.replace(
            info.ranks[0],
            host=host_identity(),
            pid=os.getpid(),
            started_at=start_time(os.getpid()),
        )
        self._say(Ready(place))

    def run(self) -> None:
        """Serve commands; raise EOFError when the leading process has closed the connection."""
        while True:
            self.round(self._pause_s())

    def round(self, pause_s: float = 0.0) -> None:
        """Wait up to ``pause_s`` for a command, run all commands, then report finished writes."""
        while self._has_command(pause_s):
            self._handle_command(TO_RANK.decode(self._connection.recv_bytes()))
            self._warm_until = time.monotonic() + _WARM_S
            pause_s = 0.0
        self._progress()
        for _ in range(len(self._writes)):
            number, write = self._writes.popleft()
            problem = ""
            try:
                if not write.is_done():
                    self._writes.append((number, write))
                    continue
            except TransferError as error:
                problem = str(error)
            self._say(Ended(number, problem))

    def _progress(self) -> None:
        """Let the transport make progress, by reading messages; this rank gets no messages."""
        try:
            self._transport.take_notifications()
        except TransferError as error:
            self._num_failures += 1
            if self._num_failures >= MAX_READ_FAILURES:
                raise
            logger.warning("the transport makes no progress: %s", error)
        else:
            self._num_failures = 0

    def _has_command(self, wait_s: float) -> bool:
        """Return whether a command has arrived; wait up to ``wait_s`` for it.

        `Connection.poll` is not used, because it can wait only whole milliseconds.
        """
        descriptor = self._connection.fileno()
        if not 0.0 < wait_s < 0.001 or descriptor >= _SELECTABLE:
            return self._connection.poll(wait_s)
        return bool(select.select([descriptor], [], [], wait_s)[0])

    def _pause_s(self) -> float:
        if self._writes:
            return IN_FLIGHT_POLL_S
        if self._permitted or time.monotonic() < self._warm_until:
            return EXPECTING_POLL_S
        return IDLE_POLL_S

    def _handle_command(self, command: ToRank) -> None:
        match command:
            case WriteBlocks() | WriteSlot():
                self._write(command)
            case Permit(engine_id, request_id, epoch, block_ids):
                self._permitted.add((engine_id, (request_id, epoch)))
                self._transport.allow(engine_id, (request_id, epoch), block_ids)
            case Forget(engine_id=engine_id):
                self._peers.pop(engine_id, None)
                self._permitted = {one for one in self._permitted if one[0] != engine_id}
                self._transport.disconnect(engine_id)
            case _:
                try:
                    answer = Answer(command.call, self._answer(command))
                except (TransferError, ValueError) as error:
                    answer = Answer(command.call, problem=str(error) or "it failed")
                self._say(answer)

    def _write(self, command: WriteBlocks | WriteSlot) -> None:
        try:
            if isinstance(command, WriteSlot):
                pending = self._transport.write_scratch(command.engine_id, command.slot)
            else:
                key = (command.request_id, command.epoch)
                pending = self._transport.write(
                    command.engine_id,
                    command.local,
                    command.remote,
                    command.layers,
                    key if key[0] else NO_TRANSFER,
                    command.groups,
                )
        except (TransferError, ValueError) as error:
            self._say(Ended(command.number, str(error) or "it failed"))
        else:
            self._writes.append((command.number, pending))

    def _answer(self, call: Call) -> object:
        match call:
            case Learn(peer=blob):
                peer = PeerInfo.decode(blob)
                path = self._transport.connect(peer)
                self._peers[peer.engine_id] = peer
                return path
            case LendSlot(slot=slot, engine_id=engine_id):
                self._transport.scratch.lend(slot, engine_id)
                return None
            case DigestSlot(slot=slot):
                return self._transport.scratch.digest_of(slot)
            case Prohibit(engine_id=engine_id, request_id=request_id, epoch=epoch):
                self._permitted.discard((engine_id, (request_id, epoch)))
                return self._transport.forbid(engine_id, (request_id, epoch))
            case DigestSlices():
                return self._digest(call)

    def _digest(self, call: DigestSlices) -> list[bytes]:
        peer = self._peers.get(call.engine_id)
        if peer is None:
            raise TransferError(f"{call.engine_id} is not connected")
        own, theirs = self._memory.manifest, peer.manifest
        slices = Slices(own, theirs) if call.writes else Slices(theirs, own)
        return self._digests.of_slices(
            call.block_ids,
            call.groups,
            call.layers,
            list(zip(call.numbers, call.contexts, strict=True)),
            BlockKey(call.key),
            slices,
            writes=call.writes,
        )

    def _say(self, message: FromRank) -> None:
        self._connection.send_bytes(ENCODER.encode(message))
