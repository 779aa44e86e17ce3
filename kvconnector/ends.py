"""Sender and Receiver: the ends of the hand-off as the nodes use them.

Each is a state machine (`protocol/`), with a filter where digests are wanted, in an I/O loop
(`io.py`) over any transport. Refuses to know: what is said, and when.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import msgspec

from baton.link.round_watch import Rounds
from baton.telemetry.node_metrics import ConnectorMetrics
from kvconnector.base import BlockPush, KVReservation, TransferEvent
from kvconnector.io import IoLoop
from kvconnector.peer_info import PeerInfo
from kvconnector.peer_process import PeerProcess, start_time
from kvconnector.protocol.actions import Abort, Begin, Drain, Drop, Leave, Meet, Push
from kvconnector.protocol.digests import (
    BlockReader,
    DigestTeller,
    DigestVerifier,
    SentDigests,
)
from kvconnector.protocol.peers import Peers
from kvconnector.protocol.receiver import ReceiveMachine
from kvconnector.protocol.seals import Channels
from kvconnector.protocol.sender import SendMachine
from kvconnector.protocol.transfer import DEVICE_PORTIONS, HOST_PORTIONS, Portions
from kvconnector.transports.base import KVTransport


def _describe(transport: KVTransport, channels: Channels) -> PeerInfo:
    """How the transport presents us, with our public key, and since when we live."""
    info = transport.peer_info
    return msgspec.structs.replace(
        info,
        public_key=channels.public_key,
        started_at=start_time(info.pid) if info.pid else 0,
    )


class _End:
    """What both ends have in common. No method blocks; all may be called from one thread of the
    node, `metrics` and `rounds` from any.

    Attributes:
        loop: to be started, or driven round by round.
    """

    peer_info: PeerInfo
    loop: IoLoop

    def describe(self) -> bytes:
        """Peer info, encoded, for the nodes of the other role."""
        return self.peer_info.encode()

    def connect(self, peer: PeerInfo) -> None:
        """Meet a node of the other role; ends in PEER_CONNECTED or PEER_FAILED."""
        self.loop.submit(Meet(peer))

    def disconnect(self, engine_id: str) -> None:
        """Forget a node that is gone; its transfers fail."""
        self.loop.submit(Leave(engine_id))

    def poll(self) -> list[TransferEvent]:
        """What happened since the last call."""
        return self.loop.poll()

    @property
    def rounds(self) -> Rounds:
        """Of the KV I/O thread; safe from any thread."""
        return self.loop.rounds

    def close(self) -> None:
        self.loop.close()


class Sender(_End):
    """The prefill node's end. Each started request ends in exactly one COMMITTED or FAILED event.

    Args:
        transport: how bytes travel; owned from now on.
        on_event: called (on the loop's thread) when `poll` has something.
        on_death: called (on the loop's thread) when the connector cannot continue.
        clock: seconds that never go back.
        digests: of this node's memory, if the decode node is to check what arrives.
        channels: that messages are sealed with; None: this process start's own.
        make_peers: of whom it knows, and how each of them is.
        portions: how much is posted at once; None: as suits the memory.

    Attributes:
        machine: the protocol; touched by the loop's thread alone.
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
        teller = None
        if digests is not None:
            sent = SentDigests(digests, own.engine_id)
            teller = DigestTeller(self.machine, sent, channels, own.manifest)
        self.loop = IoLoop(
            transport,
            self.machine,
            channels,
            teller,
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
        """Tell the decode node that ``num_tokens`` prompt tokens are being computed for it.

        Args:
            num_blocks: that will travel, but for those that the decode node has already.
            groups: of each of them, its KV group; empty: there is one.
        """
        self.loop.submit(Begin((request_id, epoch), engine_id, num_tokens, num_blocks, groups))

    def push(self, push: BlockPush) -> None:
        """Write blocks as soon as they are granted; the caller holds them until the end event.

        May be called from the thread that computes, too.
        """
        self.loop.submit(Push(push, self._clock()))

    def abort(self, request_id: str, epoch: int, reason: str) -> None:
        """Write no more of a request; FAILED follows when the wire is quiet."""
        self.loop.submit(Abort((request_id, epoch), reason))

    def metrics(self) -> ConnectorMetrics:
        return self.machine.totals.add_to(self.loop.metrics())


class Receiver(_End):
    """The decode node's end.

    Args:
        transport: how bytes travel; owned from now on.
        on_event: called (on the loop's thread) when `poll` has something.
        on_death: called (on the loop's thread) when the connector cannot continue.
        clock: seconds that never go back.
        digests: of this node's memory, if what arrives is to be checked before anybody hears of it.
        channels, make_peers: see `Sender`.

    Attributes:
        machine: the protocol; touched by the loop's thread alone.
        verifier: the filter around it.
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
        """Whoever can say that a peer has ended, so that nothing of it is written any more."""
        return PeerProcess(peer)

    def drain(self, engine_id: str) -> None:
        """Take in what a process that is dead had sent; PEER_DRAINED follows."""
        self.loop.submit(Drain(engine_id))

    def grant(self, reservation: KVReservation) -> None:
        """Allow a started request's blocks to be written."""
        self.loop.submit(reservation)

    def cancel(self, request_id: str, epoch: int, engine_id: str) -> None:
        """Ask the prefill node to write no more; FAILED follows when the wire is quiet."""
        self.loop.submit(Drop((request_id, epoch), engine_id))

    def expect(self, expecting: bool) -> None:
        """Whether anything may arrive soon; when not, the loop sleeps."""
        self.loop.expect(expecting)

    def metrics(self) -> ConnectorMetrics:
        num_wrong = 0 if self.verifier is None else self.verifier.num_wrong_blocks
        return dataclasses.replace(self.loop.metrics(), wrong_blocks=num_wrong)
