"""TlsTransport: sends writes over TLS 1.3; the receiving process copies them into its memory.

Peers have no access to this process's memory. A write names its transfer. The bytes of the write
are copied into the KV cache only while this node grants these blocks to this peer for this
transfer. Late, replayed or forged writes match no grant, and are dropped.
"""

from __future__ import annotations

import ipaddress
import os
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange, check_block_ids, check_layers
from kvconnector.layout import KVLayout, KVMemory
from kvconnector.peer_info import NUM_SLOTS, PeerInfo, RankMemory, host_identity
from kvconnector.transports.base import NO_OPTIONS, TransportOptions
from kvconnector.transports.scratch import Scratch
from kvconnector.transports.sockets.connection import Connection
from kvconnector.transports.sockets.frames import FrameError, Head, Kind, ProbeHead, Sink, WriteHead
from kvconnector.transports.sockets.identity import identity_of
from kvconnector.transports.sockets.incoming import Incoming
from kvconnector.transports.sockets.listen_address import parse_listen_address
from kvconnector.transports.sockets.memory import Discard, memory_of
from kvconnector.transports.sockets.outgoing import Outgoing, PostedWrite

PATH = "tls/tcp"
# Maximum seconds by which a round takes longer while blocks are being sent or received
ROUND_S = 0.001


class _Where(msgspec.Struct, frozen=True):
    """The address of a peer, and the identity that the peer must prove."""

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=2**16)]
    identity: bytes


_WHERE = msgspec.msgpack.Decoder(_Where)


class TlsTransport:
    """Copies blocks over TLS connections; a `KVTransport`.

    Args:
        engine_id: this node's engine id.
        memory: the KV memory that peers write to.
        options: the address to listen on, and the certificate that proves this node's identity.
        clock: returns monotonic seconds.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        engine_id: str,
        memory: KVMemory,
        options: TransportOptions = NO_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout = KVLayout.of(memory.tensor)
        self._clock = clock
        self.scratch = Scratch(engine_id, memory.tensor)
        self._blocks = memory_of(memory.tensor)
        self._probes = memory_of(self.scratch.memory.unsqueeze(1))
        self._peers: dict[str, tuple[PeerInfo, _Where]] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self._grants: dict[str, dict[TransferKey, frozenset[int]]] = {}  # by engine id
        self._inbox: list[tuple[str, bytes]] = []
        self._selector = selectors.DefaultSelector()
        # By descriptor of each watched socket: its owner, and the watched events
        self._watched: dict[int, tuple[object, int]] = {}
        self._identity = identity_of(options.tls)
        self._incoming = Incoming(
            engine_id,
            parse_listen_address(options.listen),
            self._identity,
            shown_by=self._shown_by,
            open_sink=self._open_sink,
            on_message=self._on_message,
            clock=clock,
        )
        where = _Where(*self._incoming.address, self._identity.own)
        self.peer_info = PeerInfo(
            engine_id=engine_id,
            connector="tls",
            host=host_identity(),
            pid=os.getpid(),
            manifest=memory.manifest,
            num_blocks=layout.num_blocks,
            # addresses are left out, because no peer writes by address
            ranks=(RankMemory(agent_metadata=msgspec.msgpack.encode(where)),),
            scratch_bytes=self.scratch.memory.nbytes,
        )

    # ------------------------------------------------------------------ peers

    @property
    def num_connections(self) -> int:
        return len(self._outgoing)

    def connect(self, peer: PeerInfo) -> str:
        self.peer_info.check_pair(peer)
        if len(peer.ranks) > 1:
            raise TransferError(f"{peer.engine_id} has {len(peer.ranks)} ranks, not 1")
        known = self._peers.get(peer.engine_id)
        if known is None or known[0] != peer:
            where = _read_where(peer)
            self._identity.learn(where.identity)
            self._hang_up(peer.engine_id)
            self._peers[peer.engine_id] = peer, where
        return PATH

    def disconnect(self, engine_id: str) -> None:
        # The next round drops the peer's grants and the connections that it has dialled, unless the
        # peer is added again before.
        known = self._peers.pop(engine_id, None)
        if known is not None:
            shown = known[1].identity
            if all(where.identity != shown for _, where in self._peers.values()):
                self._identity.forget(shown)
        self._hang_up(engine_id)

    def round_trip_s(self, engine_id: str) -> float:
        outgoing = self._outgoing.get(engine_id)
        trip_s = outgoing.round_trip_s if outgoing is not None else 0.0
        return trip_s and trip_s + ROUND_S / 2  # bytes wait for half a round on average

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        self._grants.setdefault(engine_id, {}).setdefault(transfer, frozenset(block_ids))

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return self._grants.get(engine_id, {}).pop(transfer, None) is not None

    def _hang_up(self, engine_id: str) -> None:
        outgoing = self._outgoing.pop(engine_id, None)
        if outgoing is not None:
            outgoing.close()

    def _shown_by(self, engine_id: str) -> bytes | None:
        known = self._peers.get(engine_id)
        return None if known is None else known[1].identity

    def _out(self, engine_id: str) -> Outgoing:
        known = self._peers.get(engine_id)
        if known is None:
            raise TransferError(f"{engine_id} is not connected")
        if engine_id not in self._outgoing:
            where = known[1]
            self._outgoing[engine_id] = Outgoing(
                self.peer_info.engine_id,
                engine_id,
                (where.host, where.port),
                where.identity,
                self._identity,
                self._clock,
            )
        return self._outgoing[engine_id]

    # ------------------------------------------------------------------ out

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PostedWrite:
        out = self._out(engine_id)
        check_block_ids(local_block_ids, self._layout.num_blocks)
        check_block_ids(remote_block_ids, self._peers[engine_id][0].num_blocks)
        check_layers(layers, self.peer_info.manifest.layers_per_unit)
        head = WriteHead(*transfer, list(remote_block_ids), layers)
        return out.write(Kind.WRITE, head, self._blocks.read(local_block_ids, layers))

    def write_scratch(self, engine_id: str, slot: int) -> PostedWrite:
        check_block_ids([slot], NUM_SLOTS)
        return self._out(engine_id).write(Kind.PROBE, ProbeHead(slot), self._probes.read([0], None))

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._out(engine_id).send(payload)

    # ------------------------------------------------------------------ in

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return arrived messages. Also send and read: up to `ROUND_S` while only blocks move."""
        # `time.monotonic` and not the injected clock, because this code waits for real sockets.
        until = time.monotonic() + ROUND_S
        for outgoing in self._outgoing.values():
            outgoing.has_ended_write = False
        self._look(0.0)
        self._progress()
        while self._only_moves_blocks() and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
            self._progress()
        for engine_id in self._grants.keys() - self._peers.keys():
            del self._grants[engine_id]
        self._watch()  # the I/O thread may sleep now
        taken, self._inbox = self._inbox, []
        return taken

    @property
    def descriptor(self) -> int | None:
        """Return a descriptor that is readable while `take_notifications` would do something."""
        fileno = getattr(self._selector, "fileno", None)  # not all kinds of selectors have one
        return None if fileno is None else int(fileno())

    def _progress(self) -> None:
        for outgoing in list(self._outgoing.values()):
            outgoing.progress()
        self._incoming.progress()

    def _connections(self) -> list[Connection]:
        out = [c for outgoing in self._outgoing.values() for c in outgoing.connections()]
        return [c for c in out + self._incoming.connections() if not c.problem]

    def _only_moves_blocks(self) -> bool:
        """Return whether blocks are on their way, and no message or ended write was found yet."""
        if self._inbox or any(outgoing.has_ended_write for outgoing in self._outgoing.values()):
            return False
        if any(outgoing.is_active for outgoing in self._outgoing.values()):
            return True
        return any(c.has_more or c.reader.is_amid for c in self._incoming.connections())

    def _watch(self) -> None:
        """Let the selector watch what the open sockets wait for."""
        wanted: dict[int, tuple[object, int]] = {
            self._incoming.listener.fileno(): (self._incoming, selectors.EVENT_READ)
        }
        for outgoing in self._outgoing.values():
            if outgoing.dialling is not None:
                wanted[outgoing.dialling.fileno()] = outgoing.dialling, selectors.EVENT_WRITE
        for connection in self._connections():
            # Almost every socket is writable, so EVENT_WRITE gives a connection a turn at once
            wants_turn = connection.queued_bytes or connection.has_more
            write_event = selectors.EVENT_WRITE if wants_turn else 0
            wanted[connection.raw.fileno()] = connection, selectors.EVENT_READ | write_event
        # The number of a closed socket may now be the number of another socket.
        for descriptor in [d for d, one in self._watched.items() if wanted.get(d) != one]:
            self._selector.unregister(descriptor)
            del self._watched[descriptor]
        for descriptor in wanted.keys() - self._watched.keys():
            self._watched[descriptor] = one, events = wanted[descriptor]
            self._selector.register(descriptor, events, one)

    def _look(self, seconds: float) -> None:
        """Set ``is_ready`` of ready connections; wait up to ``seconds`` for the first of them."""
        self._watch()
        if any(connection.has_more for connection in self._connections()):
            seconds = 0.0
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, Connection | Incoming):
                key.data.is_ready = True

    def _on_message(self, engine_id: str, payload: bytes) -> None:
        self._inbox.append((engine_id, payload))

    def _open_sink(self, engine_id: str, head: Head, payload_bytes: int) -> Sink:
        """Return a payload's destination; without a grant, its bytes are dropped.

        Raises FrameError for a head that no peer of this version sends.
        """
        if isinstance(head, ProbeHead):
            if head.slot >= NUM_SLOTS or payload_bytes != self._probes.num_bytes(1, None):
                raise FrameError("a probe with a wrong size or slot")
            slot = head.slot
            return self._probes.sink(
                [1 + slot], None, lambda: self.scratch.may_write(slot, engine_id)
            )
        assert isinstance(head, WriteHead)
        block_ids, layers = head.block_ids, head.layers
        try:
            check_block_ids(block_ids, self._layout.num_blocks)
            check_layers(layers, self.peer_info.manifest.layers_per_unit)
        except ValueError as error:
            raise FrameError(str(error)) from error
        if payload_bytes != self._blocks.num_bytes(len(block_ids), layers):
            raise FrameError("a write whose size differs from its blocks'")
        transfer = (head.request_id, head.epoch)
        granted = self._grants.get(engine_id, {}).get(transfer, frozenset())
        wanted = frozenset(block_ids)
        if len(wanted) != len(block_ids):
            raise FrameError("a write that contains a block twice")
        if not wanted <= granted:
            return Discard(payload_bytes)
        return self._blocks.sink(
            block_ids, layers, lambda: transfer in self._grants.get(engine_id, {})
        )

    def close(self) -> None:
        for engine_id in list(self._outgoing):
            self._hang_up(engine_id)
        self._incoming.close()
        self._selector.close()


def _read_where(peer: PeerInfo) -> _Where:
    """Decode a peer's address and identity; raise TransferError if they are not decodable."""
    try:
        where = _WHERE.decode(peer.ranks[0].agent_metadata)
        # Host names are refused, because looking up a name may take long
        ipaddress.ip_address(where.host)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise TransferError(f"{peer.engine_id} gives no address to connect to: {error}") from error
    return where
