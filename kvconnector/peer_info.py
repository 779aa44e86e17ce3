"""PeerInfo: what a node must know to write to another node's KV memory.

Nodes exchange peer info through the router, which passes on the bytes without decoding them. The
bytes have a checksum, because damaged peer info breaks some transports for good. The checksum
detects accidents, not attacks; the links to the router are authenticated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from baton.api.errors import TransferError
from baton.kv.manifest import MAX_RANKS, KVManifest, difference
from baton.limits import MAX_PEER_INFO_BYTES

_DIGEST_BYTES = 8
_MAX_ADDRESS = 2**63
NUM_SLOTS = 4  # number of slots of scratch memory; each peer that runs a self-test uses one slot

# Peers are not trusted: numbers larger than any machine's memory are refused before use.
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Address = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ADDRESS - 1)]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one worker of a node.

    Attributes:
        agent_metadata: data that the peer's transport needs to connect; may be empty.
        base_address: address of block 0 in the worker's memory.
        device_id: number of the GPU; 0 for host memory.
        scratch_address: address of the memory for self-tests (`Scratch`), on the same device.
        host, pid, started_at: the worker's process, as in `PeerInfo`; pid 0: the worker is in the
            node's process.
    """

    agent_metadata: bytes = b""
    base_address: Address = 0
    device_id: Number = 0
    scratch_address: Address = 0
    host: str = ""
    pid: Number = 0
    started_at: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class ProcessPlace(NamedTuple):
    """Identifies one process of a node; `PeerInfo` explains the fields."""

    host: str
    pid: int
    started_at: int


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a node's KV connector for other nodes; new at each start of the node.

    Attributes:
        engine_id: id of the process start, which is never reused.
        connector: the KV connector's name in the registry.
        host: text that is equal for two processes if they have the same kernel and process
            namespace (`host_identity`).
        pid: the process id; 0: peers cannot watch the process.
        started_at: when the process started (`peer_process.start_time`); 0: unknown.
        manifest: the layout of the node's KV blocks.
        num_blocks: number of blocks in each worker's memory.
        ranks: the KV memory of each worker, by rank.
        scratch_bytes: size of each worker's memory for self-tests.
        public_key: X25519 key from which peers derive the keys that authenticate the node's
            messages.
    """

    engine_id: str
    connector: str
    host: str
    pid: Number
    manifest: KVManifest
    num_blocks: Size
    ranks: Annotated[tuple[RankMemory, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    scratch_bytes: Size = 1
    public_key: bytes = b""
    started_at: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0

    def processes(self) -> list[ProcessPlace]:
        """Return the processes of all ranks; once all have ended, the node can write no more."""
        own = ProcessPlace(self.host, self.pid, self.started_at)
        return [
            ProcessPlace(rank.host, rank.pid, rank.started_at) if rank.pid else own
            for rank in self.ranks
        ]

    def encode(self) -> bytes:
        """Return the peer info as bytes with a checksum."""
        body = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(body) + body

    @classmethod
    def decode(cls, blob: bytes, *, engine_id: str = "") -> PeerInfo:
        """Decode bytes from `encode`; raise TransferError for any other bytes.

        Args:
            engine_id: engine id that the peer info must contain; empty: any engine id.
        """
        if len(blob) > MAX_PEER_INFO_BYTES:
            raise TransferError(
                f"peer info must have at most {MAX_PEER_INFO_BYTES} bytes, got {len(blob)}"
            )
        digest, body = blob[:_DIGEST_BYTES], blob[_DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(body) != digest:
            raise TransferError("peer info is damaged (checksum)")
        try:
            info = _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"peer info is damaged or of another version: {error}") from error
        if engine_id and info.engine_id != engine_id:
            raise TransferError(f"the peer info of {engine_id} has the id {info.engine_id:.100}")
        info.manifest.check()
        if len(info.ranks) != info.manifest.num_ranks:
            raise TransferError(
                f"ranks: the peer info lists {len(info.ranks)}, its manifest has "
                f"{info.manifest.num_ranks}"
            )
        # For a hostile manifest, it would take seconds to compute each rank's exact size
        cache_bytes = info.num_blocks * info.manifest.max_unit_bytes
        for memory in info.ranks:
            ends = (
                memory.base_address + cache_bytes,
                memory.scratch_address + info.scratch_bytes,
            )
            if max(ends) >= _MAX_ADDRESS:
                raise TransferError("peer info describes memory beyond the address 2**63")
        return info

    def check_pair(self, peer: PeerInfo) -> None:
        """Raise TransferError if blocks cannot be copied between this node and a peer."""
        if peer.connector != self.connector:
            raise TransferError(
                f"{peer.engine_id} uses the connector {peer.connector}, not {self.connector}"
            )
        differs = difference(self.manifest, peer.manifest)
        if differs:
            raise TransferError(f"{peer.engine_id} has {differs}")
        if peer.scratch_bytes != self.scratch_bytes:
            raise TransferError(f"{peer.engine_id} has another size of scratch memory")


# If several threads decode a type for the first time at the same time, msgspec crashes. So the
# decoder is made at import.
_DECODER = msgspec.msgpack.Decoder(PeerInfo)


def agent_name(engine_id: str, rank: int, leader: int) -> str:
    """Return the name of a rank's transport; the leading rank's name is the engine id."""
    return engine_id if rank == leader else f"{engine_id}/{rank}"


def host_identity() -> str:
    """Return a text that is equal for processes with the same kernel and process namespace."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # outside Linux, nothing shows which processes share a machine
        return ""
    return f"{boot_id}:{namespace}"
