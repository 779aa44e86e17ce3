"""Checks whether a model fits into the available memory, before it is loaded.

Refuses to know: loading, GPUs.
"""

from __future__ import annotations

from pathlib import Path

from baton.api.errors import ConfigError
from baton.engine_config import GIB, EngineConfig
from engine.core.kv_cache_groups import DEFAULT_BLOCK_SIZE
from engine.worker.host.host_memory import HostMemory
from models.config import ModelConfig
from models.memory_needs import memory_needs


def check_memory(
    model_folder: Path, config: EngineConfig, dtype: str, host_memory: HostMemory
) -> None:
    """Raise ConfigError if weights and KV cache do not fit into this machine's memory.

    If the options set no size of the KV cache, it gets the memory that remains, so only the weights
    are checked.

    Args:
        model_folder: the model to load on a CPU.
        config: options of its engine.
        dtype: name of the dtype that the model computes in.
        host_memory: memory of this process.
    """
    if not config.check_memory:
        return
    model = ModelConfig.from_folder(model_folder)
    needs = memory_needs(
        model,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        folder=model_folder,
        native_kernels=config.native_kernels,
    )
    kv_cache = config.kv_cache_bytes or 0
    if config.num_blocks is not None:
        # With sliding windows, a block may hold the KV of only some layers, so its size is not
        # known here.
        kv_cache = (
            0
            if any(kv.retained_tokens is not None for kv in model.kept_kv)
            else config.num_blocks * needs.kv_block_bytes
        )
    weights = needs.weights[config.weights]
    if weights + kv_cache <= host_memory.available:
        return
    smallest = min(needs.weights, key=needs.weights.__getitem__)
    smaller = f"; {smallest} take {_gib(needs.weights[smallest])}"
    raise ConfigError(
        f"weights: {config.weights} take {_gib(weights)} and the KV cache {_gib(kv_cache)}, but "
        f"{_gib(host_memory.available)} of memory is available"
        f"{smaller if smallest != config.weights else ''}; --no-check-memory loads anyway"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
