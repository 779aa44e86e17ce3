"""The KV cache: its shape, its bytes, and the one tensor. Layout: architecture section "Layout".

Block-major, `[num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]`: all layers of
a block are one contiguous range, which is what a push to another machine wants. In a uniform model
there is one group, and a block holds all layers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import xxhash

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv_manifest import KVGroup, KVKind, KVManifest
from engine.core.kv_cache_groups import KVCacheGroup, group_layers
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and element type of one block, which is the same in all groups of layers.

    The only place that knows what a layer keeps of a token: a key and a value per head. MLA
    (DeepSeek-AI, arXiv:2405.04434) keeps one latent vector instead, and would be a spec with
    another ``layer_shape``, `(block_size, latent_dim)`.
    """

    groups: tuple[KVCacheGroup, ...]
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    kv_scales: str = ""  # digest of what numbers are multiplied with; empty: with nothing

    @property
    def num_groups(self) -> int:
        """Blocks that hold ``block_size`` tokens of all layers."""
        return len(self.groups)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Of each group."""
        return tuple(group.sliding_window for group in self.groups)

    @property
    def num_null_blocks(self) -> int:
        """Blocks that no request gets: one stands where a block slid out."""
        return int(any(window is not None for window in self.sliding_windows))

    @property
    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer of the model: its group, and its place in that group's blocks."""
        places = {
            layer: (index, place)
            for index, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """What one layer keeps in one block."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """``(layers_per_group, *layer_shape)``; a shorter group leaves the last layers empty."""
        layers_per_group = max(len(group.layers) for group in self.groups)
        return (layers_per_group, *self.layer_shape)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers of a group."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def manifest(self) -> KVManifest:
        """What lies in a block, for whoever is to write there or to name what does."""
        groups = (
            KVGroup(
                kind=KVKind.PAGED if group.sliding_window is None else KVKind.WINDOW,
                layers=group.layers,
                shape=self.block_shape,
                block_size=self.block_size,
                shard_axis=2,  # heads
                dtype=str(self.dtype).removeprefix("torch."),
                scales=self.kv_scales,
                window=group.sliding_window or 0,
            )
            for group in self.groups
        )
        return KVManifest(groups=tuple(groups))


@dataclass(frozen=True, slots=True, eq=False)
class KVMemory:
    """The KV cache of one worker, as nodes see it.

    Attributes:
        tensor: `[num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]`; never
            moves. For a connector, which registers it.
        manifest: what lies in a block of it.
    """

    spec: KVCacheSpec
    tensor: torch.Tensor
    manifest: KVManifest = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifest", self.spec.manifest)

    @property
    def num_blocks(self) -> int:
        return len(self.tensor)

    @property
    def layers_per_group(self) -> int:
        """Layers in a block."""
        return self.spec.block_shape[0]

    @property
    def dtype(self) -> str:
        """Of its elements, by name."""
        return str(self.spec.dtype).removeprefix("torch.")

    def fence(self) -> Callable[[], bool] | None:
        """Asks whether a GPU has done what this thread has launched so far; None: it is done.

        To be called on the thread that computes; the answer may be asked for on any.
        """
        if not self.tensor.is_cuda:
            return None
        event: torch.Event = torch.cuda.current_stream(self.tensor.device).record_event()
        return event.query


def kv_cache_spec(
    model: ModelConfig,
    sliding_windows: tuple[int | None, ...],
    block_size: int,
    dtype: torch.dtype,
    scales: Sequence[tuple[float, float]] = (),
) -> KVCacheSpec:
    """The cache that a model needs.

    Args:
        sliding_windows: of each layer; None: full attention.
        scales: of the keys and values of each layer, where the cache is of float8.
    """
    digest = ""
    if dtype.itemsize == 1:
        digest = xxhash.xxh3_64_hexdigest(struct.pack(f"<{2 * len(scales)}d", *chain(*scales)))
    groups = group_layers(sliding_windows)
    return KVCacheSpec(groups, model.num_kv_heads, block_size, model.head_dim, dtype, digest)


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


def choose_max_model_len(
    model: ModelConfig, config: EngineConfig, spec: KVCacheSpec, num_blocks: int
) -> int:
    """Most tokens of one request: it must fit the model and, alone, the cache.

    A request begins with blocks for all its tokens in every group, so windows do not count here.

    Args:
        num_blocks: in the cache.

    Raises ConfigError when the configured length does not fit, or no block of tokens does.
    """
    needed = spec.num_groups + spec.num_null_blocks
    if num_blocks < needed:
        raise ConfigError(
            f"num_blocks: {num_blocks} blocks hold no token of this model; "
            f"at least {needed} are needed"
        )
    capacity = (num_blocks - spec.num_null_blocks) // spec.num_groups * config.block_size
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
    """The cache tensor, `[num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]`.

    Zeroed, so that what attention masks out is never a NaN. Allocated once and kept until the
    process ends: a peer may write into it. On a CPU the pages are the kernel's zero pages until
    they are written, so that a large cache costs nothing before it is used. Huge pages are asked
    for: attention jumps from block to block, and each jump is another page.
    """
    shape = (num_blocks, *spec.block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    num_bytes = num_blocks * spec.block_bytes
    try:
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"kv_cache_bytes: {num_bytes} bytes cannot be had: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=spec.dtype).view(shape)
