"""Makes the file tier that an engine's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.api.errors import ConfigError
from baton.engine_config import DEFAULT_KV_FILES_BYTES, EngineConfig
from baton.kv.manifest import KVKind
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.side_blocks import SideBlocks
from engine.executors.base import Executor
from engine.kv_files.file_system import FileSystem
from engine.kv_files.file_tier import KVFileTier
from engine.kv_files.run_store import RunStore

_KINDS = (KVKind.PAGED, KVKind.LATENT)


def make_tier(
    config: EngineConfig,
    executor: Executor,
    manager: KVCacheManager,
    side_blocks: SideBlocks,
    resume: Callable[[Request], None],
) -> KVFileTier | None:
    """Open the folder of ``--kv-files``; return None without this option.

    Args:
        manager: owner of the blocks and of the prefix cache.
        side_blocks: bounds the blocks that reads take.
        resume: queues a request that waited for a part of its prompt.

    Raises:
        ConfigError: the folder cannot be used, or files cannot hold the KV of this model.
    """
    if not config.kv_files:
        return None
    memory = executor.kv_memory
    kinds = [group.kind for group in memory.manifest.groups]
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        found = ", ".join(sorted(set(kinds)))
        raise ConfigError(
            f"kv_files: needs full attention in all layers, but this model has {len(kinds)} "
            f"groups of layers with {found} KV"
        )
    store = RunStore(
        Path(config.kv_files).expanduser(),
        config.kv_files_bytes or DEFAULT_KV_FILES_BYTES,
        memory.open_bytes(),
        manager.block_size,
        FileSystem(),
    )
    return KVFileTier(manager, side_blocks, store, resume, config.kv_files_timeout_s)
