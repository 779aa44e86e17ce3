"""The KV cache: its shape, its bytes, and the one tensor. Layout: architecture section "Layout".

Block-major, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: all layers of a
block are one contiguous range, which is what a push to another machine wants.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine_config import EngineConfig
from baton.errors import ConfigError
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and element type of one block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize


def kv_cache_spec(model: ModelConfig, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
    """The cache that a model needs."""
    return KVCacheSpec(model.num_layers, model.num_kv_heads, block_size, model.head_dim, dtype)


def choose_num_blocks(
    spec: KVCacheSpec, config: EngineConfig, measure_bytes: Callable[[], int]
) -> int:
    """How many blocks the configured memory holds; raises ConfigError if not even two.

    Args:
        measure_bytes: gives the memory for blocks where nothing is configured.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is None:
        return measure_bytes() // spec.block_bytes
    num_blocks = config.kv_cache_bytes // spec.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_bytes: {config.kv_cache_bytes} holds {num_blocks} blocks of "
            f"{spec.block_bytes} bytes; at least 2 are needed"
        )
    return num_blocks


def choose_max_model_len(model: ModelConfig, config: EngineConfig, num_blocks: int) -> int:
    """Most tokens of one request: it must fit the model and, alone, the cache.

    Args:
        num_blocks: that requests can have.

    Raises ConfigError when the configured length fits neither.
    """
    capacity = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.max_model_len, capacity)
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the model's "
            f"max_position_embeddings ({model.max_position_embeddings})"
        )
    if config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is more than the KV cache holds "
            f"({capacity} tokens)"
        )
    return config.max_model_len


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
    """The cache tensor, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    Zeroed, so that what attention masks out is never a NaN. Allocated once and kept until the
    process ends: a peer may write into it. On a CPU the pages are the kernel's zero pages until
    they are written, so that a large cache costs nothing before it is used.
    """
    shape = (num_blocks, *spec.block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    num_bytes = num_blocks * spec.block_bytes
    try:
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"kv_cache_bytes: {num_bytes} bytes cannot be had: {error}") from error
    return torch.frombuffer(memory, dtype=spec.dtype).view(shape)
