"""The contract of a transport, which copies bytes between nodes' KV and sends short messages.

Refuses to know: the protocol's messages, and the requests to which blocks belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange
from kvconnector.layout import KVMemory
from kvconnector.peer_info import PeerInfo

if TYPE_CHECKING:
    import torch


class Certificates(Protocol):
    """A certificate with its chain and key, and the trusted CAs; all in PEM."""

    @property
    def chain(self) -> bytes: ...

    @property
    def key(self) -> bytes: ...

    @property
    def ca(self) -> bytes: ...


class CertificateFiles(Protocol):
    """Certificate files that may be replaced while the process runs."""

    def current(self) -> Certificates:
        """Return the current certificates; the object stays the same until a file changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options of all transports; a transport ignores options that it does not use.

    Attributes:
        listen: host:port at which peers reach the transport; port 0: any free port.
        tls: certificates to show to peers; None: the transport makes its own certificate.
    """

    listen: str = "127.0.0.1:0"
    tls: CertificateFiles | None = None


NO_OPTIONS = TransportOptions()


class PendingWrite(Protocol):
    """A posted one-sided write; cannot be cancelled."""

    def is_done(self) -> bool:
        """Return whether all bytes have arrived; raise TransferError if they never will."""


class SelfTestMemory(Protocol):
    """Memory that peers' self-tests write to; see `Scratch`."""

    @property
    def memory(self) -> torch.Tensor: ...

    @property
    def is_on_device(self) -> bool: ...

    @property
    def digest(self) -> bytes: ...

    def lend(self, slot: int, engine_id: str) -> None: ...

    def digest_of(self, slot: int) -> bytes: ...


class KVTransport(Protocol):
    """Moves bytes between nodes. One I/O thread calls all methods; no method waits long."""

    @property
    def peer_info(self) -> PeerInfo: ...

    @property
    def scratch(self) -> SelfTestMemory:
        """Return this node's memory for self-tests."""

    @property
    def num_connections(self) -> int:
        """Return the number of peers with an open connection, including kept connections."""

    def connect(self, peer: PeerInfo) -> str:
        """Connect to a peer; return the name of the path to it. Raises TransferError."""

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; do nothing if it is unknown."""

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PendingWrite:
        """Post this node's slices of blocks, or of some layers of blocks, to a peer's memory.

        Args:
            transfer: the transfer for which the peer allowed the write (`allow`).
            groups: KV group of each block; empty: all blocks are sliced alike.

        Raises TransferError if the write cannot be posted, and ValueError for unknown ids or
        layers.
        """

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        """Post this node's pattern to a slot of a peer's scratch memory."""

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        """Allow a peer to write these blocks for a transfer.

        One-sided writes are always possible.
        """

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        """Forbid a transfer's writes; return whether none of them can arrive any more.

        A transport with one-sided writes cannot refuse writes, and returns False.
        """

    def notify(self, engine_id: str, payload: bytes) -> None:
        """Send a short message; its order relative to writes is undefined. Raises TransferError."""

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return received messages with their senders; also let the transport make progress.

        The sender is an engine id that the transport knows, or only a claim of the other end. The
        message's MAC proves the sender (`seals.py`).
        """

    def close(self) -> None: ...


class MakeTransport(Protocol):
    """Signature of the function that makes a registered transport."""

    def __call__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS, /
    ) -> KVTransport: ...
