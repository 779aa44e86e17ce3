"""NixlTransport: one-sided writes of blocks, or of ranks' slices, between registered KV caches."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.api.errors import TransferError
from baton.kv.manifest import RankCopy
from kvconnector.base import NO_TRANSFER, TransferKey
from kvconnector.blocks import (
    LayerRange,
    Ranges,
    Slices,
    check_block_ids,
    check_layers,
    part_of_scratch,
)
from kvconnector.layout import KVLayout, KVMemory
from kvconnector.peer_info import (
    NUM_SLOTS,
    PeerInfo,
    ProcessPlace,
    RankMemory,
    agent_name,
    host_identity,
)
from kvconnector.transports.base import NO_OPTIONS, PendingWrite, TransportOptions
from kvconnector.transports.nixl.agent import NixlAgent
from kvconnector.transports.paths import CMA_PATH, UNKNOWN_GPU_PATH
from kvconnector.transports.scratch import Scratch, scratch_layout
from kvconnector.transports.write_parts import post_all

logger = logging.getLogger(__name__)


# Maximum number of ranges in all tables of one peer's memory. A range takes some dozens of bytes of
# this node's memory, which a peer that claims many blocks could otherwise fill.
MAX_RANGES = 2**26
MAX_RANGES_OF_A_TABLE = 2**24


@dataclass(frozen=True, slots=True)
class _Table:
    """NIXL's tables of local and remote memory ranges, with ``num_ranges`` ranges per block.

    Attributes:
        name: name of the agent that owns the remote ranges.
    """

    name: str
    local: Any
    remote: Any
    num_ranges: int


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer that this node writes to.

    Attributes:
        slices: which slices of blocks each of this node's ranks writes to each rank of the peer.
        ranks: the peer's ranks that NIXL knows; a rank is added when it is first needed.
        tables: tables of blocks, by the peer's rank, kind of block, and layers.
        scratch_tables: tables of self-tests, by the peer's rank.
    """

    info: PeerInfo
    slices: Slices
    ranks: set[int] = field(default_factory=set)
    tables: dict[tuple[int, int, LayerRange | None], _Table] = field(default_factory=dict)
    scratch_tables: dict[int, _Table] = field(default_factory=dict)

    def name_of(self, rank: int) -> str:
        """Return the name of the NIXL agent of one of the peer's ranks."""
        return agent_name(self.info.engine_id, rank, self.info.manifest.leader)


@dataclass(frozen=True, slots=True)
class _NixlWrite:
    agent: NixlAgent
    name: str
    handle: Any

    def is_done(self) -> bool:
        return self.agent.is_done(self.name, self.handle)


class NixlTransport:
    """Copies blocks with NIXL; a `KVTransport`.

    Args:
        engine_id: the node's engine id. It must be new at each start of the process, because the
            agent's name is made from engine id and rank.
        memory: this rank's KV memory; registered once, and must not move.
    """

    def __init__(
        self, engine_id: str, memory: KVMemory, options: TransportOptions = NO_OPTIONS
    ) -> None:
        self._layout = layout = KVLayout.of(memory.tensor)
        self._manifest, self._rank = memory.manifest, memory.rank
        kv_cache = memory.tensor
        self.scratch = Scratch(engine_id, kv_cache)
        scratch = self.scratch.layout
        self._agent = NixlAgent(
            agent_name(engine_id, self._rank, self._manifest.leader),
            [layout, scratch],
            "VRAM" if kv_cache.is_cuda else "DRAM",
        )
        # This reference keeps the memory allocated while a peer may write to it
        self._kv_cache = kv_cache
        self._peers: dict[str, _Peer] = {}
        # Tables of this node's memory, by the ranges of each block or row. A table is made when
        # first needed.
        self._tables: dict[Ranges, Any] = {}
        self._scratch_tables: dict[Ranges, Any] = {}
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

    @property
    def num_connections(self) -> int:
        return self._agent.num_peers

    @property
    def descriptor(self) -> int | None:
        return self._agent.descriptor

    def connect(self, peer: PeerInfo) -> str:
        self.peer_info.check_pair(peer)
        if peer.engine_id not in self._peers:
            self._peers[peer.engine_id] = known = _Peer(peer, Slices(self._manifest, peer.manifest))
            try:
                self._learn(known, peer.manifest.leader)
            except TransferError:
                del self._peers[peer.engine_id]
                raise
        path = self._path(self._peers[peer.engine_id])
        if path == "nixl/ucx tcp" and peer.host == self.peer_info.host:
            logger.warning("%s is on this host, but its bytes travel over %s", peer.engine_id, path)
        return path

    def disconnect(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            for rank in peer.ranks:
                tables = [t.remote for (r, *_), t in peer.tables.items() if r == rank]
                if rank in peer.scratch_tables:
                    tables.append(peer.scratch_tables[rank].remote)
                self._agent.release_peer(peer.name_of(rank), tables)
            self._release_unused()

    def round_trip_s(self, engine_id: str) -> float:
        return self._agent.round_trip_s(self._peer(engine_id).info.ranks[0].agent_metadata)

    def _release_unused(self) -> None:
        """Release tables of this node's memory that no present peer needs."""
        used = {id(table.local) for peer in self._peers.values() for table in peer.tables.values()}
        for own in [own for own, table in self._tables.items() if id(table) not in used]:
            self._agent.release(self._tables.pop(own))

    def write(
        self,
        engine_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        layers: LayerRange | None = None,
        transfer: TransferKey = NO_TRANSFER,
        groups: Sequence[int] = (),
    ) -> PendingWrite:
        peer = self._peer(engine_id)
        check_block_ids(local_block_ids, self._layout.num_blocks)
        check_block_ids(remote_block_ids, peer.info.num_blocks)
        check_layers(layers, self._manifest.layers_per_unit)
        if layers == (0, self._manifest.layers_per_unit):
            layers = None  # a range of all layers uses the table of the key None
        local = np.asarray(local_block_ids, dtype=np.int32)
        remote = np.asarray(remote_block_ids, dtype=np.int32)
        posts = []
        for kind, places in peer.slices.sorted_by_kind(groups, len(local)):
            part = slice(None) if len(places) == len(local) else list(places)
            for pair, copies in peer.slices.of(kind, layers).items():
                if pair.writer == self._rank:
                    place = pair.reader, kind, layers
                    if place not in peer.tables:
                        peer.tables[place] = self._prepare(peer, pair.reader, copies)
                    table = peer.tables[place]
                    posts.append(functools.partial(self._post, table, local[part], remote[part]))
        return post_all(posts)

    def allow(self, engine_id: str, transfer: TransferKey, block_ids: Sequence[int]) -> None:
        pass  # a peer with this node's metadata can write to all registered memory

    def forbid(self, engine_id: str, transfer: TransferKey) -> bool:
        # With several ranks, silence proves nothing: only the leading rank checks the lease and
        # gets messages, and the other ranks' processes post their writes later.
        peer, own_host = self._peers.get(engine_id), self.peer_info.host
        if peer is None or peer.info.manifest.num_ranks > 1 or self._manifest.num_ranks > 1:
            return False
        if own_host in ("", peer.info.host) or not peer.info.host:
            return False  # on this host, the peer's bytes may arrive by other ways than TCP
        return self._agent.is_cut_off(engine_id, peer.info.ranks[0].agent_metadata)

    def write_scratch(self, engine_id: str, slot: int) -> PendingWrite:
        peer = self._peer(engine_id)
        check_block_ids([slot], NUM_SLOTS)
        own, remote = np.array([0], dtype=np.int32), np.array([1 + slot], dtype=np.int32)
        posts = []
        for rank in peer.slices.readers_of(self._rank):
            if rank not in peer.scratch_tables:
                peer.scratch_tables[rank] = self._prepare_scratch(peer, rank)
            posts.append(functools.partial(self._post, peer.scratch_tables[rank], own, remote))
        return post_all(posts)

    def notify(self, engine_id: str, payload: bytes) -> None:
        self._peer(engine_id)
        self._agent.notify(engine_id, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        return self._agent.take_notifications()

    def close(self) -> None:
        for engine_id in list(self._peers):
            self.disconnect(engine_id)
        self._agent.close([*self._scratch_tables.values(), *self._tables.values()])

    # ------------------------------------------------------------------ inside

    def _post(
        self, table: _Table, local: npt.NDArray[np.int32], remote: npt.NDArray[np.int32]
    ) -> _NixlWrite:
        """Post one write of all ranges of the blocks ``local`` to the blocks ``remote``."""
        if table.num_ranges > 1:
            within = np.arange(table.num_ranges, dtype=np.int32)
            local, remote = (
                (ids[:, None] * np.int32(table.num_ranges) + within).ravel()
                for ids in (local, remote)
            )
        handle = self._agent.post_write(table.name, table.local, local, table.remote, remote)
        return _NixlWrite(self._agent, table.name, handle)

    def _prepare(self, peer: _Peer, rank: int, copies: Sequence[RankCopy]) -> _Table:
        """Prepare tables for writes of this rank's slices to one of a peer's ranks."""
        _check_size(peer, len(copies))
        self._learn(peer, rank)
        memory = peer.info.ranks[rank]
        theirs = KVLayout(
            memory.base_address,
            peer.info.manifest.unit_bytes(rank),
            peer.info.num_blocks,
            memory.device_id,
        )
        own = tuple((copy.source, copy.num_bytes) for copy in copies)
        if own not in self._tables:
            self._tables[own] = self._agent.prepare("", self._layout.descriptors(own))
        there = theirs.descriptors(tuple((copy.target, copy.num_bytes) for copy in copies))
        name = peer.name_of(rank)
        return _Table(name, self._tables[own], self._agent.prepare(name, there), len(own))

    def _prepare_scratch(self, peer: _Peer, rank: int) -> _Table:
        self._learn(peer, rank)
        own = self.scratch.layout
        writers = peer.slices.writers_of(rank)
        part = (part_of_scratch(own.block_bytes, writers, self._rank),)
        if part not in self._scratch_tables:
            self._scratch_tables[part] = self._agent.prepare("", own.descriptors(part))
        memory = peer.info.ranks[rank]
        theirs = scratch_layout(memory.scratch_address, own.block_bytes, memory.device_id)
        name = peer.name_of(rank)
        remote = self._agent.prepare(name, theirs.descriptors(part))
        return _Table(name, self._scratch_tables[part], remote, 1)

    def _learn(self, peer: _Peer, rank: int) -> None:
        """Let NIXL know one of a peer's ranks, if it does not know the rank yet."""
        if rank not in peer.ranks:
            self._agent.add_peer(peer.name_of(rank), peer.info.ranks[rank].agent_metadata)
            peer.ranks.add(rank)

    def _peer(self, engine_id: str) -> _Peer:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise TransferError(f"{engine_id} is not connected")
        return peer

    def _path(self, peer: _Peer) -> str:
        """Return the data path to a peer by UCX's rules, because NIXL does not tell the path.

        From a GPU, UCX has more paths than these rules cover; a self-test's bandwidth may later
        correct the name (`judge_path`).
        """
        if self._kv_cache.is_cuda:
            return UNKNOWN_GPU_PATH
        allowed = os.environ.get("UCX_TLS", "all").split(",")
        if {"all", "cma", "sm", "shm"} & set(allowed):
            processes = peer.info.processes()
            ranks = peer.slices.readers_of(self._rank) or [peer.info.manifest.leader]
            if all(_may_access(processes[r], peer.info.ranks[r].base_address) for r in ranks):
                return CMA_PATH
        return "nixl/ucx tcp"


def _check_size(peer: _Peer, num_ranges: int) -> None:
    """Raise TransferError if a table with ``num_ranges`` ranges per block is too large."""
    num_blocks = peer.info.num_blocks
    in_all = num_blocks * (num_ranges + sum(one.num_ranges for one in peer.tables.values()))
    if num_blocks * num_ranges > MAX_RANGES_OF_A_TABLE or in_all > MAX_RANGES:
        raise TransferError(
            f"{peer.info.engine_id} has {num_blocks} blocks of {num_ranges} ranges each, which are "
            f"too many to be written to (--kv-layout heads makes them fewer)"
        )


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _may_access(process: ProcessPlace, address: int) -> bool:
    """Return whether the kernel lets this process read another's memory; tries one byte.

    UCX's cma path needs this access, which containers and hardened kernels may forbid.
    """
    if process.host == "" or process.host != host_identity():
        return False
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return False
    buffer = ctypes.create_string_buffer(1)
    local = _IoVec(ctypes.addressof(buffer), 1)
    remote = _IoVec(address, 1)
    return bool(call(process.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) == 1)
