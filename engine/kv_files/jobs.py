"""ReadJob and WriteJob: work that the engine's thread gives to the tier's threads. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Protocol

from baton.kv.block_hash import BlockHash


class BlockMemory(Protocol):
    """The bytes of the KV cache's blocks (`block_bytes.py`).

    Safe from any thread.

    Attributes:
        block_bytes: bytes of a block.
        in_use: held while a thread copies from or to a GPU; a sleep holds the lock while it frees
            the memory.
    """

    block_bytes: int
    in_use: Lock

    def contents(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """Return the bytes of blocks; on a CPU, they change when the blocks change."""

    def room_for(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """Return memory for the new bytes of blocks."""

    def put(self, block_ids: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Store the bytes that a caller has written to the memory from `room_for`."""


@dataclass(slots=True, eq=False)
class ReadJob:
    """Blocks that one thread reads from files into the KV cache.

    Attributes:
        identity: name of the folder with files of this node's KV.
        chain: hashes of a prompt's blocks.
        first: place in the chain of the first block to read.
        block_ids: blocks to fill; only the job's thread uses them until ``has_ended``.
        num_done: number of leading blocks that are filled and whose digests are right.
        causes: why not all blocks could be read (`MISS_CAUSES`).
        stop: set to end the read early.
        own: the leader's part of a read by several ranks; None: there is one rank.
        has_ended: whether the thread has stopped using the blocks.
    """

    identity: str
    chain: Sequence[BlockHash]
    first: int
    block_ids: Sequence[int]
    num_done: int = 0
    causes: tuple[str, ...] = ()
    stop: Event = field(default_factory=Event)
    own: ReadJob | None = None
    has_ended: bool = False

    @property
    def num_read(self) -> int:
        """Return how many blocks this process has read, even if other ranks still read them."""
        return self.num_done if self.own is None else self.own.num_done

    @property
    def is_stopped(self) -> bool:
        """Return whether the read must end early."""
        return self.stop.is_set()


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Cached blocks that one thread writes to a file. The job holds no reference to the blocks.

    Attributes:
        identity: name of the folder with files of this node's KV.
        chain: hashes of an ended request's blocks.
        first: place in the chain of the first of ``block_ids``.
        block_ids: blocks with the chain's contents, from ``first`` on.
        are_same: returns whether the blocks from a place in ``block_ids`` on were never changed
            since this job was made.
        has_window: whether the group keeps only the last blocks, for a window or a state. Then
            short runs are written, too, and a run is as valuable as the whole chain.
    """

    identity: str
    chain: Sequence[BlockHash]
    first: int
    block_ids: Sequence[int]
    are_same: Callable[[int], bool]
    has_window: bool = False
