"""KV connector between simulated nodes: the real protocol over a simulated network.

    Sender --- SendMachine --- IoLoop --- SimTransport  ===  SimTransport --- IoLoop --- ...

All nodes are in one process, which knows which nodes live. So there are no handshakes, probes or
keep-alive messages, and messages are not encrypted. Messages arrive at once; the writes of a node
go over its simulated link one after another. The nodes call the rounds of the I/O loops.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from baton.api.errors import TransferError
from baton.kv.manifest import KVManifest
from kvconnector.base import NO_TRANSFER, Portions, TransferKey
from kvconnector.blocks import LayerRange
from kvconnector.ends import Receiver, Sender
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.messages import Message
from kvconnector.protocol.peers import Peer, Peers, PeerState
from kvconnector.protocol.seals import Channel, Channels
from sim_node.clock import NodeClock
from sim_node.timing import TimingModel

if TYPE_CHECKING:
    import torch

TRANSPORT = "simulated"
# The simulated link has no limit: its writes take equally long in one piece or in several.
_WHOLE_PUSHES = Portions(write_bytes=2**60, in_flight_bytes=2**60)


class KVNetwork:
    """The living nodes of one process, by engine id."""

    def __init__(self) -> None:
        self._mark = f"sim:{secrets.token_hex(8)}:".encode()
        self._ends: dict[str, SimTransport] = {}

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._ends

    def __getitem__(self, engine_id: str) -> SimTransport:
        return self._ends[engine_id]

    def connect_end(self, engine_id: str, end: SimTransport) -> None:
        self._ends[engine_id] = end

    def remove(self, engine_id: str) -> None:
        self._ends.pop(engine_id, None)

    def peer_info(self, engine_id: str) -> bytes:
        """Return the peer info of a node, which says only that the node is in this process."""
        return self._mark + engine_id.encode()

    def problem(self, peer_info: bytes) -> str:
        """Return why a peer cannot be reached; empty: it can be reached."""
        if peer_info.startswith(self._mark):
            return ""
        return "simulated nodes reach only peers of the same sim-node process"


@dataclass(slots=True)
class _Write:
    """A write of blocks to a peer, in progress."""

    has_arrived: bool = False

    def is_done(self) -> bool:
        return self.has_arrived


class _NoScratch:
    """Takes the place of the memory that probes write to; simulated nodes send no probes."""

    is_on_device = False
    digest = b""

    @property
    def memory(self) -> torch.Tensor:
        raise NotImplementedError

    def lend(self, slot: int, engine_id: str) -> None:
        raise NotImplementedError

    def digest_of(self, slot: int) -> bytes:
        raise NotImplementedError


class SimTransport:
    """Simulates transfers of blocks that do not exist; a `KVTransport`.

    Args:
        engine_id: the node's engine id.
        network: the network that the node is in.
        manifest: layout that the blocks would have.
        num_blocks: number of blocks that the node pretends to have.
        timing: returns the current timing; called for each write, because nodes may become slow.
        clock: the node's clock.
        on_arrival: called when a message has arrived or a write has ended.
    """

    scratch = _NoScratch()

    def __init__(
        self,
        engine_id: str,
        network: KVNetwork,
        manifest: KVManifest,
        num_blocks: int,
        *,
        timing: Callable[[], TimingModel],
        clock: NodeClock,
        on_arrival: Callable[[], None],
    ) -> None:
        self.peer_info = PeerInfo(
            engine_id=engine_id,
            connector=TRANSPORT,
            host="",
            pid=0,
            manifest=manifest,
            num_blocks=num_blocks,
            ranks=(RankMemory(),),
        )
        self._network = network
        self._layer_bytes = manifest.unit_bytes() // manifest.layers_per_unit
        self._num_layers = manifest.layers_per_unit
        self._timing = timing
        self._clock = clock
        self._on_arrival = on_arrival
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._link_free_at = 0.0
        network.connect_end(engine_id, self)

    @property
    def num_connections(self) -> int:
        return 0

    def connect(self, peer: PeerInfo) -> str:
        if peer.engine_id not in self._network:
            raise TransferError(f"{peer.engine_id} is gone")
        return TRANSPORT

    def disconnect(self, engine_id: str) -> None:
        pass

    def round_trip_s(self, engine_id: str) -> float:
        return 0.0

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> _Write:
        first, end = layers or (0, self._num_layers)
        num_bytes = len(local_block_ids) * (end - first) * self._layer_bytes
        timing, now = self._timing(), self._clock.now()
        self._link_free_at = max(self._link_free_at, now) + num_bytes / timing.link_bytes_per_s
        write = _Write()

        def arrive(_: float) -> None:
            write.has_arrived = True
            self._on_arrival()

        self._clock.call_at(self._link_free_at + timing.link_latency_s, arrive)
        return write

    def write_scratch(self, engine_id: str, slot: int) -> _Write:
        raise NotImplementedError

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return False

    def notify(self, engine_id: str, payload: bytes) -> None:
        if engine_id not in self._network:
            raise TransferError(f"{engine_id} is gone")
        end = self._network[engine_id]
        end._inbox.append((self.peer_info.engine_id, payload))
        end._on_arrival()

    def take_notifications(self) -> list[tuple[str, bytes]]:
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def close(self) -> None:
        self._network.remove(self.peer_info.engine_id)


class _Open:
    """A channel to a peer, which does not encrypt messages."""

    def seal(self, body: bytes) -> bytes:
        return body

    def open(self, payload: bytes) -> bytes:
        return payload


class _OpenChannels(Channels):
    """The channels to all peers in this process, which do not encrypt messages."""

    _open: Any = _Open()

    def __init__(self) -> None:
        pass

    @property
    def public_key(self) -> bytes:
        return b""

    def __contains__(self, engine_id: object) -> bool:
        return True

    def __getitem__(self, engine_id: str) -> Channel:
        return self._open  # type: ignore[no-any-return]


class NearPeers(Peers):
    """Peers in this process, which are connected while they live, unless the router lost them.

    Args:
        network: the network of the peers.
        known: the other positional arguments of `Peers`.
    """

    def __init__(self, *known: Any, network: KVNetwork, **calls: Any) -> None:
        super().__init__(*known, **calls)
        self._network = network

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._peers or engine_id in self._network

    def __getitem__(self, engine_id: str) -> Peer:
        peer = self._peers.get(engine_id)
        if peer is None:
            info = self._network[engine_id].peer_info
            peer = Peer(info, TRANSPORT, inf, PeerState.CONNECTED, alive_at=inf, is_probed=True)
            self._peers[engine_id] = peer
        return peer

    def meet(self, info: PeerInfo) -> None:
        """Do nothing: the network knows all peers."""

    def note_alive(self, engine_id: str, at_s: float) -> None:
        """Do nothing: the network knows which peers live."""

    def leave(self, engine_id: str) -> None:
        if engine_id in self:
            self[engine_id].state = PeerState.LEAVING

    def may_start(self, engine_id: str) -> bool:
        return engine_id in self and self[engine_id].state is PeerState.CONNECTED

    def send(self, engine_id: str, message: Message, *, wants_result: bool = False) -> bool:
        if engine_id not in self._network:
            return False
        return super().send(self[engine_id].engine_id, message, wants_result=wants_result)

    def may_write(self, engine_id: str) -> bool:
        return engine_id in self._network

    def tick(self) -> None:
        """Do nothing: the network knows which peers live."""


class _Life(PeerProcess):
    """Tells whether a simulated peer has ended; takes the place of watching a process."""

    def __init__(self, engine_id: str, network: KVNetwork) -> None:
        self.engine_id = engine_id
        self._network = network

    def has_ended(self) -> bool:
        return self.engine_id not in self._network

    def close(self) -> None:
        pass


class SimReceiver(Receiver):
    """A receiver that asks the simulated network which peers live."""

    def __init__(
        self, transport: SimTransport, network: KVNetwork, clock: Callable[[], float], **calls: Any
    ) -> None:
        super().__init__(transport, clock=clock, **_near(network), **calls)
        self._network = network

    def watch(self, peer: PeerInfo) -> PeerProcess:
        return _Life(peer.engine_id, self._network)


def make_sender(
    transport: SimTransport, network: KVNetwork, clock: Callable[[], float], **calls: Any
) -> Sender:
    """Make a sender over a simulated network."""
    return Sender(transport, clock=clock, portions=_WHOLE_PUSHES, **_near(network), **calls)


def _near(network: KVNetwork) -> dict[str, Any]:
    """Return replacements for the connector's parts that connect to and watch processes."""
    return {"channels": _OpenChannels(), "make_peers": partial(NearPeers, network=network)}
