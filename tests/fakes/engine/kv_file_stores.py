"""A store of runs over memory without an engine, whose blocks have random bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from baton.kv.block_hash import BlockHash, BlockHasher, extra_keys_of
from engine.kv_files.jobs import ReadJob, WriteJob
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.folder import FolderStorage
from engine.kv_files.storage.storage import StorageTerms

BLOCK_SIZE, BLOCK_BYTES, IDENTITY = 16, 256, "a1"


class Blocks:
    """Memory of blocks; a `BlockMemory`."""

    def __init__(self, num_blocks: int = 64, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.in_use = Lock()
        self.memory = memoryview(bytearray(num_blocks * block_bytes))

    def contents(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        size = self.block_bytes
        return [self.memory[i * size : (i + 1) * size] for i in block_ids]

    room_for = contents

    def put(self, block_ids: Sequence[int], parts: Sequence[memoryview]) -> None:
        """Do nothing: the parts are the memory."""


def content_of(block_hash: BlockHash, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes that tests store under a hash."""
    return random.Random(block_hash).randbytes(num_bytes)


def chain_of(seed: int, num_blocks: int, salt: bytes = b"") -> list[BlockHash]:
    """Return the hashes of a prompt."""
    chain: list[BlockHash] = []
    tokens = [(seed * 31 + i) % 5000 for i in range(num_blocks * BLOCK_SIZE)]
    BlockHasher(BLOCK_SIZE, namespace=b"n").extend(chain, tokens, extra_keys_of(salt))
    return chain


def open_store(
    folder: Path,
    limit_bytes: int = 2**30,
    files: FileSystem | None = None,
    memory: Blocks | None = None,
) -> tuple[RunStore, Blocks]:
    """Open a folder as a node does at its start."""
    blocks = memory or Blocks()
    storage = FolderStorage(StorageTerms(str(folder)), files)
    store = RunStore(storage, limit_bytes, blocks, BLOCK_SIZE)
    store.scan()
    return store, blocks


def folder_of(store: RunStore) -> FolderStorage:
    """Return the folder of a store."""
    storage = store._storage
    assert isinstance(storage, FolderStorage)
    return storage


def write(store: RunStore, blocks: Blocks, chain: Sequence[BlockHash]) -> None:
    """Write a chain whose blocks are in memory, first block first."""
    for part, block_hash in zip(blocks.contents(range(len(chain))), chain, strict=True):
        part[:] = content_of(block_hash, blocks.block_bytes)
    store.write(WriteJob(IDENTITY, chain, 0, range(len(chain)), lambda place: True))


def read(
    store: RunStore,
    blocks: Blocks,
    chain: Sequence[BlockHash],
    identity: str = IDENTITY,
    first: int = 0,
) -> ReadJob:
    """Read a chain's blocks from ``first`` on; check those that the store calls right."""
    job = ReadJob(identity, chain, first, range(len(chain) - first))
    store.read(job)
    found = blocks.contents(range(job.num_done))
    for part, block_hash in zip(found, chain[first:], strict=False):
        assert part == content_of(block_hash, blocks.block_bytes)
    return job
