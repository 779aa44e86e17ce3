"""Makes the file tier that an engine's options ask for."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine_config import DEFAULT_KV_FILES_BYTES, EngineConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.side_blocks import SideBlocks
from engine.executors.base import Executor
from engine.kv_files.file_tier import KVFileTier
from engine.kv_files.open_store import StoreTerms, open_store
from engine.kv_files.rank_stores import RankStores, open_rank_stores
from engine.kv_files.run_store import RunStore
from engine.kv_files.storage.storage import StorageTerms


def make_tier(
    config: EngineConfig,
    executor: Executor,
    manager: KVCacheManager,
    side_blocks: SideBlocks,
    resume: Callable[[Request], None],
) -> KVFileTier | None:
    """Open the folder or bucket of ``--kv-files``; return None without this option.

    Args:
        manager: owner of the blocks and of the prefix cache.
        side_blocks: limits the blocks that reads and other transfers withhold from requests.
        resume: puts a request that waited for files in line again.

    Raises:
        ConfigError: the folder or bucket cannot be used, or a rank cannot open its files.
    """
    if not config.kv_files:
        return None
    memory, manifest = executor.kv_memory, executor.kv_memory.manifest
    where = StorageTerms(config.kv_files, config.kv_files_secret, config.kv_files_timeout_s)
    limit_bytes = config.kv_files_bytes or DEFAULT_KV_FILES_BYTES
    terms = StoreTerms(where, limit_bytes, manager.block_size)
    own = open_store(terms, memory.open_bytes())
    store: RunStore | RankStores = own
    facts = ""
    if manifest.num_ranks > 1:
        facts = f" {manifest.num_ranks} {manifest.num_stages} {manifest.stage_layers}"
        store = open_rank_stores(own, memory.rank, terms, executor.attach)
    windows = memory.spec.sliding_windows
    return KVFileTier(
        manager,
        side_blocks,
        store,
        resume,
        config.kv_files_timeout_s,
        windows=windows,
        facts=facts,
        max_model_len=executor.max_model_len,
    )
