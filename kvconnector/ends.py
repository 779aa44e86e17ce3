"""Sender and Receiver: the two ends of the KV hand-off, as the nodes' code uses them.

Each end is a state machine (`protocol/`) that an I/O loop (`io.py`) drives over any transport. If
blocks are checked, a filter (`protocol/digests.py`) surrounds the state machine. Refuses to know:
the protocol's messages.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import msgspec

from baton.telemetry.round_watch import Rounds
from kvconnector.base import (
    DEVICE_PORTIONS,
    HOST_PORTIONS,
    BlockPush,
    ConnectorMetrics,
    KVReservation,
    Portions,
    TransferEvent,
)
from kvconnector.io import IoLoop
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess, start_time
from kvconnector.protocol.actions import Abort, Begin, Drain, Drop, Leave, Meet, Push, StateMachine
from kvconnector.protocol.digests import (
    BlockReader,
    DigestTeller,
    DigestVerifier,
    SentDigests,
)
from kvconnector.protocol.link_meter import LinkMeter
from kvconnector.protocol.peers import Peers
from kvconnector.protocol.receiver import ReceiveMachine
from kvconnector.protocol.seals import Channels
from kvconnector.protocol.sender import SendMachine
from kvconnector.transports.base import KVTransport


def _describe(transport: KVTransport, channels: Channels) -> PeerInfo:
    """Return the transport's peer info, with the public key and the process's start time added."""
    info = transport.peer_info
    return msgspec.structs.replace(
        info,
        public_key=channels.public_key,
        started_at=start_time(info.pid) if info.pid else 0,
    )


class _End:
    """The common base of `Sender` and `Receiver`.

    No method blocks. Only one thread of the node may call methods, except `metrics` and `rounds`,
    which any thread may call.

    Attributes:
        loop: the I/O loop. The owner starts the loop's thread, or calls `round` again and again.
    """

    peer_info: PeerInfo
    loop: IoLoop

    def describe(self) -> bytes:
        """Return the encoded peer info that nodes of the other role need to connect."""
        return self.peer_info.encode()

    def connect(self, peer: PeerInfo) -> None:
        """Connect to a node of the other role; a PEER_CONNECTED or PEER_FAILED event follows."""
        self.loop.submit(Meet(peer))

    def disconnect(self, engine_id: str) -> None:
        """Forget a node that the router has lost; transfers with this node fail."""
        self.loop.submit(Leave(engine_id))

    def poll(self) -> list[TransferEvent]:
        """Return the events since the last call."""
        return self.loop.poll()

    @property
    def rounds(self) -> Rounds:
        """Return how many rounds the KV I/O thread has ended, and whether one runs; thread-safe."""
        return self.loop.rounds

    def close(self) -> None:
        self.loop.close()


class Sender(_End):
    """The prefill node's end. Each started transfer ends with one COMMITTED or FAILED event.

    Args:
        transport: moves the bytes; the sender closes it.
        on_event: called on the loop's thread when `poll` has new events.
        on_death: called on the loop's thread when the connector cannot continue.
        clock: returns monotonic seconds.
        digests: computes the digests of this node's blocks; None: decode nodes do not check blocks.
        channels: authenticate the messages to and from peers; None: make channels with a new key.
        make_peers: makes the table of peers and their states.
        portions: limits on the bytes posted at once; None: the default for host or GPU memory.

    Attributes:
        machine: the protocol's state machine; only the loop's thread may use it.
    """

    def __init__(
        self,
        transport: KVTransport,
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        digests: BlockReader | None = None,
        *,
        channels: Channels | None = None,
        make_peers: Callable[..., Peers] = Peers,
        portions: Portions | None = None,
    ) -> None:
        self._clock = clock
        channels = channels or Channels(transport.peer_info.engine_id)
        self.peer_info = own = _describe(transport, channels)
        scratch = transport.scratch
        if portions is None:
            portions = DEVICE_PORTIONS if scratch.is_on_device else HOST_PORTIONS
        self.machine = SendMachine(
            own, scratch.digest, portions, is_verified=digests is not None, make_peers=make_peers
        )
        machine: StateMachine = self.machine
        if digests is not None:
            sent = SentDigests(digests, own.engine_id)
            machine = DigestTeller(machine, sent, channels, own.manifest)
        self.loop = IoLoop(
            transport,
            self.machine,
            channels,
            LinkMeter(self.machine, machine),
            on_event=on_event,
            on_death=on_death,
            clock=clock,
        )

    def start(
        self,
        request_id: str,
        epoch: int,
        engine_id: str,
        *,
        num_tokens: int,
        num_blocks: int,
        groups: Sequence[int] = (),
    ) -> None:
        """Tell a decode node that this node computes ``num_tokens`` prompt tokens for it.

        Args:
            num_blocks: number of blocks to send if the decode node has none of them.
            groups: KV group of each of these blocks; empty: there is only one group.
        """
        self.loop.submit(Begin((request_id, epoch), engine_id, num_tokens, num_blocks, groups))

    def push(self, push: BlockPush) -> None:
        """Write blocks as soon as they are granted; the caller keeps them until the transfer ends.

        The thread that computes the blocks may call this method, too.
        """
        self.loop.submit(Push(push, self._clock()))

    def abort(self, request_id: str, epoch: int, reason: str) -> None:
        """Write no more blocks of a request; a FAILED event follows once no write is in flight."""
        self.loop.submit(Abort((request_id, epoch), reason))

    def metrics(self) -> ConnectorMetrics:
        return self.machine.totals.add_to(self.loop.metrics())


class Receiver(_End):
    """The decode node's end of the hand-off.

    Args:
        transport: moves the bytes; the receiver closes it.
        on_event: called on the loop's thread when `poll` has new events.
        on_death: called on the loop's thread when the connector cannot continue.
        clock: returns monotonic seconds.
        digests: computes the digests of this node's blocks; None: arrived blocks are not checked.
        channels, make_peers: as for `Sender`.

    Attributes:
        machine: the protocol's state machine; only the loop's thread may use it.
        verifier: the filter around the machine that checks blocks; None: blocks are not checked.
    """

    def __init__(
        self,
        transport: KVTransport,
        on_event: Callable[[], None],
        on_death: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        digests: BlockReader | None = None,
        *,
        channels: Channels | None = None,
        make_peers: Callable[..., Peers] = Peers,
    ) -> None:
        channels = channels or Channels(transport.peer_info.engine_id)
        self.peer_info = own = _describe(transport, channels)
        self.machine = ReceiveMachine(own, make_peers=make_peers)
        self.verifier = None
        if digests is not None:
            self.verifier = DigestVerifier(
                self.machine, digests, own.engine_id, channels, own.manifest
            )
        self.loop = IoLoop(
            transport,
            self.machine,
            channels,
            self.verifier,
            on_event=on_event,
            on_death=on_death,
            clock=clock,
        )

    def watch(self, peer: PeerInfo) -> PeerProcess:
        """Return a watch on a peer's processes; once all have ended, the peer can write no more."""
        return PeerProcess(peer)

    def drain(self, engine_id: str) -> None:
        """Read all bytes that a dead peer has sent; a PEER_DRAINED event follows."""
        self.loop.submit(Drain(engine_id))

    def grant(self, reservation: KVReservation) -> None:
        """Allow the prefill node to write the blocks of a started request."""
        self.loop.submit(reservation)

    def cancel(self, request_id: str, epoch: int, engine_id: str) -> None:
        """Ask the prefill node to write no more; FAILED follows once no write can arrive."""
        self.loop.submit(Drop((request_id, epoch), engine_id))

    def expect(self, expecting: bool) -> None:
        """Tell the loop whether messages may arrive soon; if not, the loop polls rarely."""
        self.loop.expect(expecting)

    def metrics(self) -> ConnectorMetrics:
        num_wrong = 0 if self.verifier is None else self.verifier.num_wrong_blocks
        return dataclasses.replace(self.loop.metrics(), wrong_blocks=num_wrong)
