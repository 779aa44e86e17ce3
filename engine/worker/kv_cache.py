"""The KV cache: its shape, size and tensor. docs/architecture.md, "Layout", explains the layout.

Block-major: all layers of a block form one contiguous range, so that a hand-off copies few, long
ranges. In a uniform model there is one group, and a block holds all layers:

    [num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]
    [num_blocks, 1, num_kv_heads, layers_per_group, 2, block_size, head_dim]     ordered by heads

If layers keep different arrays (latents, states, other numbers of heads), a block is a run of bytes
with a view for each layer. Blocks of all groups have equal size; unused bytes are at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import torch
import xxhash
from torch import Tensor

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from baton.kv.layers import AnyKV, LatentKV, LayerKV, PagedKV, shared_layers
from baton.kv.manifest import (
    KVGroup,
    KVKind,
    KVManifest,
    KVOrder,
    array_offsets,
    stage_span,
)
from baton_kernels.huge_pages import huge_pages
from engine.core.kv_cache_groups import KVCacheGroup, group_layers, smallest_block_size
from engine.kv_files.block_bytes import BlockBytes
from models.base import LayerCache
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Contents and layout of the blocks of a KV cache, group by group.

    Attributes:
        groups: groups of layers, over all stages.
        block_size: tokens per block.
        dtype: dtype of keys, values and latents.
        compute_dtype: dtype of activations, and of states whose description names no dtype.
        kv_scales: digest of the scales of stored keys and values; empty: no scales.
        rank: number of this rank within its pipeline stage.
        num_ranks: number of ranks of a stage; they share the stage's layers, so each holds a part
            of a block.
        stage: number of the pipeline stage that this rank belongs to.
        num_stages: number of stages that share the model's layers.
        stage_layers: number of layers of each stage; empty: equal numbers.
        by_heads: whether keys and values are ordered by head first, where possible, instead of by
            layer.
        kv_sources: layers that read an earlier layer's keys and values -> the earlier layers.
    """

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    kv_scales: str = ""
    rank: int = 0
    num_ranks: int = 1
    stage: int = 0
    num_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    by_heads: bool = False
    kv_sources: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def num_groups(self) -> int:
        """Return the number of groups, which is the number of blocks per logical block."""
        return len(self.groups)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Return each group's window, in tokens, with the current token; None: no window."""
        return tuple(group.kv.retained_tokens for group in self.groups)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """Return the indices of the groups whose layers keep a state."""
        return tuple(i for i, group in enumerate(self.groups) if group.kv.kind is KVKind.STATE)

    @property
    def num_null_blocks(self) -> int:
        """Return how many blocks no request gets: 1, the null block, if any group has a window."""
        return int(any(window is not None for window in self.sliding_windows))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Return the index of the group of each layer of the model."""
        groups = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        groups |= {layer: groups[source] for layer, source in self.kv_sources.items()}
        return tuple(groups[layer] for layer in range(len(groups)))

    @property
    def manifest(self) -> KVManifest:
        """Return the description of a block over all ranks, for peers that write or hash blocks."""
        groups = [
            KVGroup(
                kind=group.kv.kind,
                layers=group.layers,
                arrays=group.kv.arrays(
                    self.block_size, dtype_name(self.dtype), dtype_name(self.compute_dtype)
                ),
                num_places=len(group.layers),
                block_size=self.block_size,
                scales="" if group.kv.kind is KVKind.STATE else self.kv_scales,
                window=group.kv.retained_tokens or 0 if group.kv.kind is KVKind.WINDOW else 0,
                handoff=group.kv.handoff,
            )
            for group in self.groups
        ]
        # Pad groups with few layers to as many places as the largest group has.
        if len({group.arrays for group in groups}) == 1:
            num_places = max(group.num_places for group in groups)
            groups = [msgspec.structs.replace(group, num_places=num_places) for group in groups]
            if self.by_heads and all(isinstance(group.kv, PagedKV) for group in self.groups):
                groups = [msgspec.structs.replace(g, order=KVOrder.HEADS) for g in groups]
        return KVManifest(
            groups=tuple(groups),
            num_ranks=self.num_ranks * self.num_stages,
            num_stages=self.num_stages,
            stage_layers=self.stage_layers,
        )

    @property
    def node_rank(self) -> int:
        """Return this rank's number among all ranks of all stages."""
        return self.stage * self.num_ranks + self.rank

    @property
    def block_bytes(self) -> int:
        """Return the bytes of this rank's part of a block, which are equal in all groups."""
        return self.manifest.unit_bytes(self.node_rank)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Return a block's shape in the tensor: ``(layers, *shape)``.

        ``(1, bytes)`` if layers differ, and ``(1, heads, layers, 2, block_size, head_dim)`` if the
        cache is ordered by heads.
        """
        if self._plain is None:
            return (1, self.block_bytes)
        if self._is_by_heads:
            layers, two, heads, *shape = self._plain
            return (1, heads, layers, two, *shape)
        return self._plain

    @property
    def _is_by_heads(self) -> bool:
        return self.manifest.groups[0].order is KVOrder.HEADS

    @property
    def tensor_dtype(self) -> torch.dtype:
        """Return the tensor's dtype: the dtype of keys and values, or uint8 if layers differ."""
        return torch.uint8 if self._plain is None else self.dtype

    @property
    def _plain(self) -> tuple[int, ...] | None:
        """Return ``(layers, *shape)`` if every layer keeps one array of this shape, else None."""
        manifest = self.manifest
        first, *others = manifest.groups
        if len(first.arrays) > 1 or any(group.arrays != first.arrays for group in others):
            return None
        num_places = manifest.num_places(self.stage)
        return (num_places, *first.arrays[0].rank_shape(self.rank, self.num_ranks))

    def layer_caches(self, tensor: Tensor) -> tuple[LayerCache, ...]:
        """Return each layer's views of the cache, each `[num_blocks, *shape]`.

        A layer with attention has one view, a layer with a state a tuple of views, and a layer of
        another stage an empty tensor.

        Args:
            tensor: the memory from `allocate_kv_cache`.
        """
        plain, by_heads = self._plain is not None, self._is_by_heads
        caches: dict[int, LayerCache] = {}
        manifest = self.manifest
        for group, described in zip(self.groups, manifest.groups, strict=True):
            caches |= dict.fromkeys(group.layers, tensor[:0])
            own = [p for p in manifest.places(described, self.stage) if p < len(group.layers)]
            for place, layer in enumerate(group.layers[index] for index in own):
                if by_heads:
                    views: tuple[Tensor, ...] = (tensor[:, 0, :, place].transpose(1, 2),)
                else:
                    views = (tensor[:, place],) if plain else self._views(tensor, described, place)
                caches[layer] = views if described.kind is KVKind.STATE else views[0]
        caches |= {layer: caches[source] for layer, source in self.kv_sources.items()}
        return tuple(caches[layer] for layer in range(len(caches)))

    def _views(self, tensor: Tensor, group: KVGroup, place: int) -> tuple[Tensor, ...]:
        """Return the views of one layer's arrays if blocks are runs of bytes."""
        ranks = (self.rank, self.num_ranks)
        views = []
        offsets = array_offsets(group.arrays, *ranks)
        for array, offset in zip(group.arrays, offsets, strict=False):
            start = place * group.layer_bytes(*ranks) + offset
            view = tensor[:, 0, start : start + array.num_bytes(*ranks)]
            view = view.view(getattr(torch, array.dtype))
            views.append(view.view(len(tensor), *array.rank_shape(*ranks)))
        return tuple(views)


@dataclass(frozen=True, slots=True, eq=False)
class KVMemory:
    """Facts about one worker's KV cache that a connector needs.

    Attributes:
        tensor: `[num_blocks, layers or 1, ...]`, see `KVCacheSpec.block_shape`; its address never
            changes, because a connector registers the memory.
        manifest: description of a block over all ranks.
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
    def rank(self) -> int:
        """Return this worker's number among all ranks."""
        return self.spec.node_rank

    @property
    def layers_per_group(self) -> int:
        """Return into how many layers a hand-off can split a block; 1: it cannot split a block."""
        return self.manifest.layers_per_unit if self.spec.tensor_dtype == self.spec.dtype else 1

    @property
    def dtype(self) -> str:
        """Return the name of the dtype of keys and values."""
        return dtype_name(self.spec.dtype)

    def open_bytes(self) -> BlockBytes:
        """Return the bytes of this worker's blocks, for files."""
        return BlockBytes(self.tensor)

    def fence(self) -> Callable[[], bool] | None:
        """Return a query for whether all GPU work launched so far is done; None: all is done.

        Call this on the computing thread; any thread may call the query.
        """
        if not self.tensor.is_cuda:
            return None
        event: torch.Event = torch.cuda.current_stream(self.tensor.device).record_event()
        return event.query


def kv_cache_spec(
    kv_layers: Sequence[AnyKV],
    block_size: int,
    dtype: torch.dtype,
    scales: Sequence[tuple[float, float]] = (),
    compute_dtype: torch.dtype | None = None,
    ranks: tuple[int, int] = (0, 1),
    stages: tuple[int, int] = (0, 1),
    *,
    stage_layers: tuple[int, ...] = (),
    by_heads: bool = False,
) -> KVCacheSpec:
    """Choose the layout of the KV cache for a model.

    Args:
        kv_layers: description of each layer's KV or states.
        block_size: tokens per block; 0: 16, or more if the model's states need more.
        scales: scales of each layer's keys and values in a float8 cache; empty: no scales.
        compute_dtype: dtype of activations; None: ``dtype``.
        ranks: this rank's number in its stage, and the number of ranks in the stage.
        stages: number of this rank's stage, and the number of stages.
        stage_layers: number of layers of each stage; empty: equal numbers.
        by_heads: whether keys and values are ordered by head first, where possible.

    Raises:
        ConfigError: blocks of this size cannot hold the model's states, or the model's KV is not
            supported.
    """
    compute_dtype = compute_dtype or dtype
    digest = ""
    if dtype.itemsize == 1:
        digest = xxhash.xxh3_64_hexdigest(struct.pack(f"<{2 * len(scales)}d", *chain(*scales)))
        if any(isinstance(kv, LatentKV) for kv in kv_layers):
            raise ConfigError("kv_cache_dtype: fp8 is not supported for latents (MLA)")

    names = dtype_name(dtype), dtype_name(compute_dtype)

    def layer_bytes(kv: LayerKV, num_tokens: int) -> int:
        return array_offsets(kv.arrays(num_tokens, *names))[-1]

    block_size = block_size or smallest_block_size(kv_layers, layer_bytes)
    groups, kv_sources = group_layers(kv_layers, block_size, layer_bytes), shared_layers(kv_layers)
    if kv_sources and not stage_layers:  # peers cannot count the layers, which are in no group
        spans = (stage_span(len(kv_layers), stage, stages[1]) for stage in range(stages[1]))
        stage_layers = tuple(end - first for first, end in spans)
    return KVCacheSpec(
        *(groups, block_size, dtype, compute_dtype, digest, *ranks, *stages),
        stage_layers=stage_layers,
        by_heads=by_heads,
        kv_sources=kv_sources,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in options and manifests, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def choose_num_blocks(
    spec: KVCacheSpec, config: EngineConfig, measure_bytes: Callable[[], int]
) -> int:
    """Return how many blocks the configured memory holds; raises ConfigError if fewer than two.

    Args:
        measure_bytes: returns the bytes available for blocks; called only if the options set no
            size.
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
    """Return the maximum number of tokens of one request, by model, options and cache size.

    A request starts with blocks for all its tokens in every group, so sliding windows do not raise
    this limit.

    Args:
        num_blocks: number of blocks in the cache.

    Raises ConfigError if the length in the options does not fit into the cache, or no token does.
    """
    needed = spec.num_groups + spec.num_null_blocks
    if num_blocks < needed:
        raise ConfigError(
            f"num_blocks: {num_blocks} blocks hold no token of this model; "
            f"at least {needed} are needed"
        )
    capacity = (num_blocks - spec.num_null_blocks) // spec.num_groups * spec.block_size
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
    """Allocate the cache tensor, `[num_blocks, *spec.block_shape]`.

    The memory is zeroed, so that masked positions are never NaN. The memory is allocated once and
    kept until the process ends, because peers may write into it. On a CPU, the kernel allocates
    pages on their first write, so unused blocks take no memory (see ``host/pages_ahead.py``). The
    cache is advised to use huge pages, because attention reads scattered blocks.
    """
    shape = (num_blocks, *spec.block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=spec.tensor_dtype, device=device)
    num_bytes = num_blocks * spec.block_bytes
    try:
        memory = huge_pages(num_bytes)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"kv_cache_bytes: {num_bytes} bytes cannot be allocated: {error}"
        ) from error
    return memory.view(spec.tensor_dtype).view(shape)
