"""The KV connector between simulated nodes: its protocol as it is, over a network that takes time.

    Sender --- SendMachine --- IoLoop --- SimTransport  ===  SimTransport --- IoLoop --- ...

All ends are in one process, which knows who lives: nobody is greeted, probed or asked for beats,
and messages need no seal. They arrive at once; bytes share their node's link, one write behind the
other. Who drives the loops is the nodes.
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
from baton.kv_manifest import KVManifest
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange
from kvconnector.ends import Receiver, Sender
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.peer_process import PeerProcess
from kvconnector.protocol.messages import Message
from kvconnector.protocol.peers import Peer, Peers, PeerState
from kvconnector.protocol.seals import Channel, Channels
from kvconnector.protocol.transfer import Portions
from sim_node.clock import NodeClock
from sim_node.timing import TimingModel

if TYPE_CHECKING:
    import torch

TRANSPORT = "simulated"
# A link here carries whatever is posted: more events would tell nothing more.
_WHOLE_PUSHES = Portions(write_bytes=2**60, in_flight_bytes=2**60)


class KVNetwork:
    """The nodes of one process, by engine id."""

    def __init__(self) -> None:
        self._mark = f"sim:{secrets.token_hex(8)}:".encode()
        self._ends: dict[str, SimTransport] = {}

    def __contains__(self, engine_id: object) -> bool:
        return engine_id in self._ends

    def __getitem__(self, engine_id: str) -> SimTransport:
        return self._ends[engine_id]

    def add(self, engine_id: str, end: SimTransport) -> None:
        self._ends[engine_id] = end

    def remove(self, engine_id: str) -> None:
        self._ends.pop(engine_id, None)

    def peer_info(self, engine_id: str) -> bytes:
        """What routers are given for a node's peers: only that it is of this process."""
        return self._mark + engine_id.encode()

    def problem(self, peer_info: bytes) -> str:
        """Why a peer cannot be reached; empty when it can."""
        if peer_info.startswith(self._mark):
            return ""
        return "simulated nodes reach only peers of the same sim-node process"


@dataclass(slots=True)
class _Write:
    """On its way."""

    has_arrived: bool = False

    def is_done(self) -> bool:
        return self.has_arrived


class _NoScratch:
    """In the place of memory for self-tests: there are none."""

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
    """See `kvconnector.transports.base.KVTransport` for the contract.

    Args:
        engine_id: of the node.
        network: that it is in.
        manifest: of blocks that there are none of.
        num_blocks: of them.
        timing: asked for at each write: a node may become slow.
        clock: of the node.
        on_arrival: called when a message or the end of a write can be read.
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
        network.add(engine_id, self)

    @property
    def num_connections(self) -> int:
        return 0

    def connect(self, peer: PeerInfo) -> str:
        if peer.engine_id not in self._network:
            raise TransferError(f"{peer.engine_id} is gone")
        return TRANSPORT

    def disconnect(self, engine_id: str) -> None:
        pass

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
    """A channel of one process with itself."""

    def seal(self, body: bytes) -> bytes:
        return body

    def open(self, payload: bytes) -> bytes:
        return payload


class _OpenChannels(Channels):
    """Messages as they are, to anybody of this process."""

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
    """Peers of this process: there as long as they live, and their router does not say otherwise.

    Args:
        network: that they are in.
        known: see `Peers`.
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
        """Nothing is to be learnt."""

    def note_alive(self, engine_id: str, at_s: float) -> None:
        """Nobody asks."""

    def leave(self, engine_id: str) -> None:
        if engine_id in self:
            self[engine_id].state = PeerState.LEAVING

    def may_start(self, engine_id: str) -> bool:
        return engine_id in self and self[engine_id].state is PeerState.CONNECTED

    def send(self, engine_id: str, message: Message, *, tells: bool = False) -> bool:
        is_there = engine_id in self._network
        return is_there and super().send(self[engine_id].engine_id, message, tells=tells)

    def may_write(self, engine_id: str) -> bool:
        return engine_id in self._network

    def tick(self) -> None:
        """Ask nobody for signs of life."""


class _Life(PeerProcess):
    """Whether a simulated peer has ended."""

    def __init__(self, engine_id: str, network: KVNetwork) -> None:
        self.engine_id = engine_id
        self._network = network

    def has_ended(self) -> bool:
        return self.engine_id not in self._network

    def close(self) -> None:
        pass


class SimReceiver(Receiver):
    """A receiver whose peers' lives are known."""

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
    """What both ends need in place of what ends of different processes do."""
    return {"channels": _OpenChannels(), "make_peers": partial(NearPeers, network=network)}
