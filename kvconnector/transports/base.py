"""What a transport must do: bytes from one node's KV memory to another's, and short messages.

Refuses to know: what the protocol says over it, whose blocks they are.
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
    """A certificate with its chain, its key, and the CAs that are trusted; all PEM."""

    @property
    def chain(self) -> bytes: ...

    @property
    def key(self) -> bytes: ...

    @property
    def ca(self) -> bytes: ...


class CertificateFiles(Protocol):
    """Where certificates are read from; they may be replaced at any time."""

    def current(self) -> Certificates:
        """What is to be used now; the same object as long as nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What a transport may be told; one that has no use for it ignores it.

    Attributes:
        listen: host:port at which peers reach it; port 0: any free one.
        tls: what it shows its peers; None: it makes itself something to show.
    """

    listen: str = "127.0.0.1:0"
    tls: CertificateFiles | None = None


NO_OPTIONS = TransportOptions()


class PendingWrite(Protocol):
    """A posted one-sided write. It cannot be called back."""

    def is_done(self) -> bool:
        """Whether all bytes are complete at the peer; raises TransferError if they never will."""


class SelfTestMemory(Protocol):
    """What self-tests are written to: see `Scratch`."""

    @property
    def memory(self) -> torch.Tensor: ...

    @property
    def is_on_device(self) -> bool: ...

    @property
    def digest(self) -> bytes: ...

    def lend(self, slot: int, engine_id: str) -> None: ...

    def digest_of(self, slot: int) -> bytes: ...


class KVTransport(Protocol):
    """Bytes from here to there. All methods are called by one I/O thread; none waits long."""

    @property
    def peer_info(self) -> PeerInfo: ...

    @property
    def scratch(self) -> SelfTestMemory:
        """Our memory for self-tests."""

    @property
    def num_connections(self) -> int:
        """Return the number of peers with an open connection, kept peers included."""

    def connect(self, peer: PeerInfo) -> str:
        """Learn a peer; returns the name of the path that bytes will take. Raises TransferError."""

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; harmless when unknown."""

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PendingWrite:
        """Post blocks, whole or these layers of them, to a peer's memory: our slices of them.

        Args:
            transfer: that the peer has allowed it for (`allow`).
            groups: of each block, its KV group; empty: they travel alike.

        Raises TransferError; ValueError for ids or layers that there are not.
        """

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        """Post our pattern to a slot of a peer's scratch memory, as `write` does blocks."""

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        """Let a peer write these of our blocks for a transfer. One-sided writes ask nobody."""

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        """Let it write no more; whether from now on nothing of the transfer can land, though it
        was allowed. Of one-sided writes nobody can say that."""

    def notify(self, engine_id: str, payload: bytes) -> None:
        """Send a short message; not ordered with writes. Raises TransferError."""

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that came in; also lets the transport make progress.

        Each with the engine id of its sender as far as the transport knows it: that may be what the
        other end calls itself. Whose message it is, its seal decides (`seals.py`).
        """

    def close(self) -> None: ...


class MakeTransport(Protocol):
    """What a registered transport is called with."""

    def __call__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS, /
    ) -> KVTransport: ...
