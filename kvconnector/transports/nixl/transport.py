"""NixlTransport: one-sided writes of whole blocks between registered KV caches."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.api.errors import TransferError
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import LayerRange, check_block_ids, check_layers
from kvconnector.layout import KVLayout, KVMemory
from kvconnector.peer_info import NUM_SLOTS, PeerInfo, RankMemory, host_identity
from kvconnector.transports.base import NO_OPTIONS, TransportOptions
from kvconnector.transports.nixl.agent import NixlAgent
from kvconnector.transports.paths import UNKNOWN_GPU_PATH
from kvconnector.transports.scratch import Scratch, scratch_layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Peer:
    layout: KVLayout
    scratch_table: Any
    tables: dict[LayerRange | None, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _NixlWrite:
    agent: NixlAgent
    handle: Any

    def is_done(self) -> bool:
        return self.agent.is_done(self.handle)


class NixlTransport:
    """See `KVTransport` for the contract.

    Args:
        engine_id: also the agent's name, so it must be new at every process start.
        memory: registered once, and must stay where it is.
    """

    def __init__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS
    ) -> None:
        self._layout = layout = KVLayout.of(memory.tensor)
        kv_cache = memory.tensor
        self.scratch = Scratch(engine_id, kv_cache)
        scratch = self.scratch.layout
        self._agent = NixlAgent(
            engine_id, [layout, scratch], "VRAM" if kv_cache.is_cuda else "DRAM"
        )
        self._scratch_table = self._agent.prepare("", scratch.descriptors())
        self._kv_cache = kv_cache  # keeps the memory alive as long as a peer may write to it
        self._peers: dict[str, _Peer] = {}
        # Prepared tables of our blocks and of each peer's, whole or some layers of them; few ranges
        # of layers are ever asked for, and each is prepared when it is for the first time.
        self._tables: dict[LayerRange | None, Any] = {None: self._prepare_own(None)}
        self.peer_info = PeerInfo(
            engine_id=engine_id,
            connector="nixl",
            host=host_identity(),
            pid=os.getpid(),
            manifest=memory.manifest,
            num_blocks=layout.num_blocks,
            ranks=(
                RankMemory(
                    agent_metadata=self._agent.metadata(),
                    base_address=layout.base_address,
                    device_id=layout.device_id,
                    scratch_address=scratch.base_address,
                ),
            ),
            scratch_bytes=self.scratch.memory.nbytes,
        )

    def connect(self, peer: PeerInfo) -> str:
        self.peer_info.check_pair(peer)
        if peer.engine_id in self._peers:
            return self._path(peer)
        (memory,) = peer.ranks
        remote = dataclasses.replace(
            self._layout,  # but for where it is, and how many blocks there are
            base_address=memory.base_address,
            num_blocks=peer.num_blocks,
            device_id=memory.device_id,
        )
        scratch = scratch_layout(
            memory.scratch_address, self.scratch.layout.block_bytes, memory.device_id
        )
        self._agent.add_peer(peer.engine_id, memory.agent_metadata)
        scratch_table = self._agent.prepare(peer.engine_id, scratch.descriptors())
        self._peers[peer.engine_id] = _Peer(remote, scratch_table)
        path = self._path(peer)
        if path == "nixl/ucx tcp" and peer.host == host_identity():
            logger.warning("%s is on this host, but bytes take %s", peer.engine_id, path)
        return path

    def disconnect(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._agent.remove_peer(engine_id, [peer.scratch_table, *peer.tables.values()])

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
    ) -> _NixlWrite:
        peer = self._peer(engine_id)
        check_block_ids(local_block_ids, self._layout.num_blocks)
        check_block_ids(remote_block_ids, peer.layout.num_blocks)
        check_layers(layers, self._layout.num_layers)
        if layers not in self._tables:
            self._tables[layers] = self._prepare_own(layers)
        if layers not in peer.tables:
            descriptors = peer.layout.descriptors(layers)
            peer.tables[layers] = self._agent.prepare(engine_id, descriptors)
        local = np.asarray(local_block_ids, dtype=np.int32)
        remote = np.asarray(remote_block_ids, dtype=np.int32)
        handle = self._agent.post_write(self._tables[layers], local, peer.tables[layers], remote)
        return _NixlWrite(self._agent, handle)

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass  # whoever has our metadata can write all that is registered

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        return False

    def write_scratch(self, engine_id: str, slot: int) -> _NixlWrite:
        peer = self._peer(engine_id)
        check_block_ids([slot], NUM_SLOTS)
        own, remote = np.array([0], dtype=np.int32), np.array([1 + slot], dtype=np.int32)
        handle = self._agent.post_write(self._scratch_table, own, peer.scratch_table, remote)
        return _NixlWrite(self._agent, handle)

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._peer(engine_id)
        self._agent.notify(engine_id, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        return self._agent.take_notifications()

    def close(self) -> None:
        for engine_id in list(self._peers):
            self.disconnect(engine_id)
        self._agent.close([self._scratch_table, *self._tables.values()])

    def _prepare_own(self, layers: LayerRange | None) -> Any:
        return self._agent.prepare("", self._layout.descriptors(layers))

    def _peer(self, engine_id: str) -> _Peer:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise TransferError(f"{engine_id} is not connected")
        return peer

    def _path(self, peer: PeerInfo) -> str:
        """The path UCX takes to a peer, worked out as UCX does; NIXL itself does not tell.

        From a GPU it has more ways than can be worked out: the self-test's bandwidth may tell.
        """
        if self._kv_cache.is_cuda:
            return UNKNOWN_GPU_PATH
        allowed = os.environ.get("UCX_TLS", "all").split(",")
        near = peer.host != "" and peer.host == host_identity()
        if near and ({"all", "cma", "sm", "shm"} & set(allowed)) and _may_access(peer):
            return "nixl/ucx cma"
        return "nixl/ucx tcp"


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _may_access(peer: PeerInfo) -> bool:
    """Whether the kernel lets us at a process's memory; reading a byte needs the same permission.

    Containers and hardened kernels may forbid what UCX's cma path needs.
    """
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return False
    buffer = ctypes.create_string_buffer(1)
    local = _IoVec(ctypes.addressof(buffer), 1)
    remote = _IoVec(peer.ranks[0].base_address, 1)
    return bool(call(peer.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 1)
