"""PeerInfo: what a node must know of another to reach its KV memory. Opaque to everyone else.

It travels as framed bytes with a checksum: some transports are damaged for good by a damaged blob.
That is against accidents. Who may say it is decided by the links to the router that it travels on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from baton.api.errors import TransferError
from baton.kv_manifest import MAX_RANKS, KVManifest, difference
from baton.limits import MAX_PEER_INFO_BYTES

_DIGEST_BYTES = 8
_MAX_ADDRESS = 2**63
NUM_SLOTS = 4  # of scratch memory: so many peers are probed at the same time

# A peer may claim anything; what does not fit a machine is refused before it is computed with.
Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Address = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ADDRESS - 1)]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one of a node's workers.

    Attributes:
        agent_metadata: the transport's own; empty if it needs none.
        base_address: of block 0.
        device_id: of a GPU's memory; 0 in host memory.
        scratch_address: of the memory for self-tests (`Scratch`), on the same device.
        host, pid, started_at: of its process, as in `PeerInfo`; pid 0: that is the node's own.
    """

    agent_metadata: bytes = b""
    base_address: Address = 0
    device_id: Number = 0
    scratch_address: Address = 0
    host: str = ""
    pid: Number = 0
    started_at: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class ProcessPlace(NamedTuple):
    """One process of a node: see `PeerInfo`."""

    host: str
    pid: int
    started_at: int


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process start of a node, as its KV connector presents it.

    Attributes:
        engine_id: unique to the process start.
        connector: name in the registry.
        host: equal for processes that can reach each other's memory through the kernel.
        pid: of the process; 0: nobody is to ask for it.
        started_at: when the process began (`peer_process.start_time`); 0 where nobody can say.
        manifest: what lies in its blocks.
        num_blocks: in the memory of each of its workers.
        ranks: the workers' memory, by rank.
        scratch_bytes: of each worker's memory for self-tests.
        public_key: X25519; what it says to us carries a MAC that it makes with this key.
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
        """The process of each rank: nothing is written any more when all of them have ended."""
        own = ProcessPlace(self.host, self.pid, self.started_at)
        return [
            ProcessPlace(rank.host, rank.pid, rank.started_at) if rank.pid else own
            for rank in self.ranks
        ]

    def encode(self) -> bytes:
        """Framed bytes."""
        body = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(body) + body

    @classmethod
    def decode(cls, blob: bytes, *, engine_id: str = "") -> PeerInfo:
        """Raises TransferError for anything that `encode` did not make.

        Args:
            engine_id: of the node that the router says it is of; empty: nobody has said.
        """
        if len(blob) > MAX_PEER_INFO_BYTES:
            raise TransferError(
                f"peer info must be of at most {MAX_PEER_INFO_BYTES} bytes, got {len(blob)}"
            )
        digest, body = blob[:_DIGEST_BYTES], blob[_DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(body) != digest:
            raise TransferError("peer info is damaged (checksum)")
        try:
            info = msgspec.msgpack.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"peer info is damaged or of another version: {error}") from error
        if engine_id and info.engine_id != engine_id:
            raise TransferError(f"the peer info of {engine_id} is of {info.engine_id:.100}")
        info.manifest.check()
        if len(info.ranks) != info.manifest.num_ranks:
            raise TransferError(
                f"ranks: {len(info.ranks)} of them in the peer info, and "
                f"{info.manifest.num_ranks} in its manifest"
            )
        for rank, memory in enumerate(info.ranks):
            ends = (
                memory.base_address + info.num_blocks * info.manifest.unit_bytes(rank),
                memory.scratch_address + info.scratch_bytes,
            )
            if max(ends) >= _MAX_ADDRESS:
                raise TransferError("peer info describes more memory than there can be")
        return info

    def check_pair(self, peer: PeerInfo) -> None:
        """Raises TransferError if no block of ours can be copied into a block of a peer's."""
        if peer.connector != self.connector:
            raise TransferError(f"{peer.engine_id} speaks {peer.connector}, not {self.connector}")
        differs = difference(self.manifest, peer.manifest)
        if differs:
            raise TransferError(f"{peer.engine_id} has {differs}")
        if peer.scratch_bytes != self.scratch_bytes:
            raise TransferError(f"{peer.engine_id} has other scratch memory")


def agent_name(engine_id: str, rank: int, leader: int) -> str:
    """Return what a rank's transport is called: as its node, if it speaks for it."""
    return engine_id if rank == leader else f"{engine_id}/{rank}"


def host_identity() -> str:
    """Equal for processes on one running kernel in one process namespace."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux: nobody is near
        return ""
    return f"{boot_id}:{namespace}"
