"""InMemoryTransport: connects nodes in one process, for tests; a write copies memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import torch

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange, Slices, check_block_ids, check_layers, part_of_scratch
from kvconnector.layout import KVMemory
from kvconnector.peer_info import NUM_SLOTS, PeerInfo, RankMemory, agent_name, host_identity
from kvconnector.transports.base import NO_OPTIONS, TransportOptions
from kvconnector.transports.scratch import Scratch


class _Done:
    def is_done(self) -> bool:
        return True


class InMemoryTransport:
    """A transport that reaches every other InMemoryTransport of this process.

    Args:
        engine_id: this node's engine id.
        memory: the KV memory that peers write to.
    """

    # All open transports of this process, which form the "network".
    _ends: ClassVar[dict[str, InMemoryTransport]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS
    ) -> None:
        self._rank, manifest = memory.rank, memory.manifest
        self._bytes = memory.tensor.view(len(memory.tensor), -1).view(torch.uint8)
        self.scratch = Scratch(engine_id, memory.tensor)
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._peers: dict[str, tuple[PeerInfo, Slices]] = {}
        self._name = agent_name(engine_id, self._rank, manifest.leader)
        self.peer_info = PeerInfo(
            engine_id=engine_id,
            connector="in_memory",
            host=host_identity(),
            pid=0,
            manifest=memory.manifest,
            num_blocks=len(memory.tensor),
            ranks=(RankMemory(),),
            scratch_bytes=self.scratch.memory.nbytes,
        )
        with self._lock:
            self._ends[self._name] = self

    @property
    def num_connections(self) -> int:
        return len(self._peers)

    def connect(self, peer: PeerInfo) -> str:
        self.peer_info.check_pair(peer)
        if peer.engine_id not in self._ends:
            raise TransferError(f"{peer.engine_id} is not in this process")
        slices = Slices(self.peer_info.manifest, peer.manifest)
        self._peers.setdefault(peer.engine_id, (peer, slices))
        return "in_memory"

    def disconnect(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)

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
    ) -> _Done:
        self._end(engine_id)
        peer, slices = self._peers[engine_id]
        check_block_ids(local_block_ids, len(self._bytes))
        check_block_ids(remote_block_ids, peer.num_blocks)
        check_layers(layers, self.peer_info.manifest.layers_per_unit)
        for kind, places in slices.sorted_by_kind(groups, len(local_block_ids)):
            own = [local_block_ids[place] for place in places]
            theirs = [remote_block_ids[place] for place in places]
            for pair, copies in slices.of(kind, layers).items():
                if pair.writer == self._rank:
                    end = self._end(engine_id, pair.reader)
                    for _, _, source, target, size in copies:
                        with torch.inference_mode():
                            moved = self._bytes[own, source : source + size]
                            end._bytes[theirs, target : target + size] = moved
        return _Done()

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return False

    def write_scratch(self, engine_id: str, slot: int) -> _Done:
        self._end(engine_id)
        check_block_ids([slot], NUM_SLOTS)
        own, slices = self.scratch.memory, self._peers[engine_id][1]
        for reader in slices.readers_of(self._rank):
            writers = slices.writers_of(reader)
            first, size = part_of_scratch(own.shape[1], writers, self._rank)
            part = slice(first, first + size)
            with torch.inference_mode():
                self._end(engine_id, reader).scratch.memory[1 + slot, part] = own[0, part]
        return _Done()

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._end(engine_id)._inbox.append((self.peer_info.engine_id, payload))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        payloads = []
        while self._inbox:
            payloads.append(self._inbox.popleft())
        return payloads

    def close(self) -> None:
        with self._lock:
            self._ends.pop(self._name, None)

    def _end(self, engine_id: str, rank: int | None = None) -> InMemoryTransport:
        """Return the transport of a peer's rank; ``rank`` None: the peer's leading rank."""
        name = engine_id
        if rank is not None:
            leader = self._peers[engine_id][0].manifest.leader
            name = agent_name(engine_id, rank, leader)
        end = self._ends.get(name)
        if engine_id not in self._peers or end is None:
            raise TransferError(f"{name} is gone")
        return end
