"""InMemoryTransport: sender and receiver in one process; a write is a copy. For tests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import torch

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange, check_block_ids, check_layers
from kvconnector.layout import KVMemory
from kvconnector.peer_info import NUM_SLOTS, PeerInfo, RankMemory, host_identity
from kvconnector.transports.base import NO_OPTIONS, TransportOptions
from kvconnector.transports.scratch import Scratch


class _Done:
    def is_done(self) -> bool:
        return True


class InMemoryTransport:
    """Reaches every other InMemoryTransport of this process.

    Args:
        engine_id: name of this end.
        memory: that peers write to.
    """

    # The "network": all open ends of this process.
    _ends: ClassVar[dict[str, InMemoryTransport]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS
    ) -> None:
        self._blocks = memory.tensor
        self.scratch = Scratch(engine_id, memory.tensor)
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._peers: set[str] = set()
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
            self._ends[engine_id] = self

    def connect(self, peer: PeerInfo) -> str:
        self.peer_info.check_pair(peer)
        if peer.engine_id not in self._ends:
            raise TransferError(f"{peer.engine_id} is not in this process")
        self._peers.add(peer.engine_id)
        return "in_memory"

    def disconnect(self, engine_id: str) -> None:
        self._peers.discard(engine_id)

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
    ) -> _Done:
        end = self._end(engine_id)
        check_block_ids(local_block_ids, len(self._blocks))
        check_block_ids(remote_block_ids, len(end._blocks))
        check_layers(layers, self._blocks.shape[1])
        part = slice(None) if layers is None else slice(*layers)
        with torch.inference_mode():
            end._blocks[list(remote_block_ids), part] = self._blocks[list(local_block_ids), part]
        return _Done()

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return False

    def write_scratch(self, engine_id: str, slot: int) -> _Done:
        memory = self._end(engine_id).scratch.memory
        check_block_ids([slot], NUM_SLOTS)
        with torch.inference_mode():
            memory[1 + slot] = self.scratch.memory[0]
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
            self._ends.pop(self.peer_info.engine_id, None)

    def _end(self, engine_id: str) -> InMemoryTransport:
        end = self._ends.get(engine_id)
        if engine_id not in self._peers or end is None:
            raise TransferError(f"{engine_id} is gone")
        return end
