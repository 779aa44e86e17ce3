"""KV memory without an engine: any tensor of blocks, and a manifest that fits it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.kv.manifest import KVArray, KVGroup, KVKind, KVManifest


@dataclass(frozen=True)
class PlainMemory:
    """See `KVMemory`."""

    tensor: torch.Tensor
    manifest: KVManifest
    rank: int = 0


def memory_of(tensor: torch.Tensor) -> PlainMemory:
    """Return a memory of blocks `[num_blocks, num_layers, ...]` that every rank keeps whole."""
    return PlainMemory(tensor, manifest(*tensor.shape[1:], dtype=tensor.dtype))


def manifest(*shape: int, dtype: torch.dtype = torch.float32) -> KVManifest:
    """Return the manifest of blocks of this shape, layers first."""
    group = KVGroup(
        kind=KVKind.PAGED,
        layers=tuple(range(shape[0])),
        arrays=(KVArray(shape=shape[1:], dtype=str(dtype).removeprefix("torch.")),),
        num_places=shape[0],
        block_size=shape[-2],
    )
    return KVManifest(groups=(group,))
