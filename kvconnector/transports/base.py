"""The contract of a transport, which copies bytes between nodes' KV and sends short messages.

Refuses to know: the content of the protocol's messages, the requests to which blocks belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange
from kvconnector.layout import KVMemory
from kvconnector.peer_info import PeerInfo

if TYPE_CHECKING:
    import torch


class Certificates(Protocol):
    """A node's certificate with its chain and private key, and the trusted CAs; all in PEM."""

    @property
    def chain(self) -> bytes: ...

    @property
    def key(self) -> bytes: ...

    @property
    def ca(self) -> bytes: ...


class CertificateFiles(Protocol):
    """A node's certificate files, which may be replaced while the process runs."""

    def current(self) -> Certificates:
        """Return the files' certificates: the same object again unless a file has changed."""


# Seconds after which a TCP connection fails if the other end acknowledges nothing. Without this
# limit, TCP repeats lost bytes at intervals that double, so after a cut of the network, a pair of
# nodes could stay disconnected for as long again. The limit is longer than a peer's lease.
UNACKNOWLEDGED_S = 3
# Seconds of silence after which a peer certainly posts no more writes for its present transfers. A
# lease (`protocol/peers.py`) is shorter, and ends first at the sender.
SILENT_S = 2.0


class QueueFullError(TransferError):
    """A long message was not sent, because too many bytes wait for the peer.

    The connection is kept. The caller may send the message again once fewer bytes wait.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of all transports; a transport ignores options that it does not use.

    Attributes:
        listen: host:port on which the transport listens for peers; port 0: any free port.
        tls: certificates to show to peers; None: the transport makes its own certificate.
    """

    listen: str = "127.0.0.1:0"
    tls: CertificateFiles | None = None


NO_OPTIONS = TransportOptions()


class PendingWrite(Protocol):
    """A write that was posted to a peer's memory; cannot be cancelled."""

    def is_done(self) -> bool:
        """Return whether all bytes have arrived; raise TransferError if the write has failed."""


class SelfTestMemory(Protocol):
    """The memory that peers' self-tests write to; `Scratch` implements it."""

    @property
    def memory(self) -> torch.Tensor: ...

    @property
    def is_on_device(self) -> bool: ...

    @property
    def digest(self) -> bytes: ...

    def lend(self, slot: int, engine_id: str) -> None: ...

    def digest_of(self, slot: int) -> bytes: ...


class KVTransport(Protocol):
    """Copies bytes between nodes. Only the I/O thread calls the methods; no method waits long."""

    @property
    def peer_info(self) -> PeerInfo: ...

    @property
    def scratch(self) -> SelfTestMemory:
        """Return this node's memory for self-tests."""

    @property
    def num_connections(self) -> int:
        """Return the number of peers with an open connection, including disconnected peers."""

    def connect(self, peer: PeerInfo) -> str:
        """Connect to a peer; return the name of the data path. Raises TransferError."""

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; do nothing if the peer is unknown."""

    def round_trip_s(self, engine_id: str) -> float:
        """Return the shortest recent round trip of the path to a peer; 0.0: unknown."""

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PendingWrite:
        """Post a write of blocks, or of some of their layers, to blocks of a peer.

        Args:
            transfer: the transfer for which the peer has allowed writes to these blocks (`allow`).
            groups: KV group of each block; empty: there is only one group.

        Raises TransferError if the write cannot be posted, and ValueError for unknown ids or
        layers.
        """

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        """Post a write of this node's pattern to a slot of a peer's scratch memory."""

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        """Allow a peer to write these blocks of this node for a transfer.

        Does nothing in a transport whose writes are one-sided: peers can always write.
        """

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        """Forbid a transfer's writes; return whether none of them can arrive any more.

        A transport whose writes are one-sided cannot refuse them, and returns False while the peer
        may still write.
        """

    def notify(self, engine_id: str, payload: bytes) -> None:
        """Send a message; it may overtake writes, or arrive later.

        Raises QueueFullError, or another TransferError if the connection has failed.
        """

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return received messages with their senders. Also does the transport's pending work.

        Some transports pass on an engine id that the sender only claims. The message's MAC proves
        the sender (`seals.py`).
        """

    def close(self) -> None: ...


class MakeTransport(Protocol):
    """Signature of the function that makes a transport of the registry."""

    def __call__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS, /
    ) -> KVTransport: ...
