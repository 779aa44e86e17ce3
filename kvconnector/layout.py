"""Where a block lies in a KV cache's memory. The one other place that knows the cache's layout.

The cache is block-major (`engine/worker/kv_cache.py`), so block i is one contiguous range, and so
are its layers a to b:

    base_address + i * block_bytes  ..  base_address + (i + 1) * block_bytes
        + a * layer_bytes  ..  + b * layer_bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.kv_manifest import KVManifest
from kvconnector.blocks import LayerRange


class KVMemory(Protocol):
    """The KV cache of one worker, as a connector sees it."""

    @property
    def manifest(self) -> KVManifest:
        """What lies in a block."""

    @property
    def tensor(self) -> torch.Tensor:
        """`[num_blocks, num_layers, ...]`, contiguous; stays where it is."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of the blocks of one cache.

    Attributes:
        device_id: of a GPU's memory; 0 in host memory.
        num_layers: in a block.
    """

    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int
    num_layers: int = 1

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> KVLayout:
        """The layout of a cache `[num_blocks, num_layers, ...]`, contiguous."""
        assert kv_cache.is_contiguous()
        return cls(
            base_address=kv_cache.data_ptr(),
            block_bytes=kv_cache[0].nbytes,
            num_blocks=len(kv_cache),
            device_id=max(kv_cache.get_device(), 0),
            num_layers=kv_cache.shape[1],
        )

    def descriptors(self, layers: LayerRange | None = None) -> npt.NDArray[np.uint64]:
        """(address, bytes, device) of every block, or of these layers of it, `[num_blocks, 3]`."""
        first, end = layers or (0, self.num_layers)
        layer_bytes = self.block_bytes // self.num_layers
        table = np.empty((self.num_blocks, 3), dtype=np.uint64)
        table[:, 0] = self.base_address + np.arange(self.num_blocks) * self.block_bytes
        table[:, 0] += np.uint64(first * layer_bytes)
        table[:, 1] = (end - first) * layer_bytes
        table[:, 2] = self.device_id
        return table
