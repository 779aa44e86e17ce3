"""Opens the store of runs that options name; each rank of a node opens its own in this way."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_files.jobs import BlockMemory
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage import STORAGES
from engine.kv_files.storage.storage import StorageTerms


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """Options with which each rank opens its store.

    Attributes:
        storage: where the files are.
        limit_bytes: maximum bytes of all files.
        block_size: tokens per block.
    """

    storage: StorageTerms
    limit_bytes: int
    block_size: int


def open_store(terms: StoreTerms, memory: BlockMemory) -> RunStore:
    """Open the store of one rank; raises ConfigError.

    Args:
        memory: bytes of the rank's blocks.
    """
    scheme, found, _ = terms.storage.location.partition("://")
    storage = STORAGES.load(scheme if found else "")(terms.storage)
    return RunStore(storage, terms.limit_bytes, memory, terms.block_size)
