"""Where a block lies in a KV cache's memory. The one other place that knows the cache's layout.

The cache is block-major (`engine/worker/kv_cache.py`), so block i is one contiguous range, and what
travels of it are ranges within:

    base_address + i * block_bytes  ..  base_address + (i + 1) * block_bytes
        + first  ..  + first + num_bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from baton.kv_manifest import KVManifest
from kvconnector.slices import Ranges

if TYPE_CHECKING:
    import torch


class KVMemory(Protocol):
    """The KV cache of one worker, as a connector sees it."""

    @property
    def manifest(self) -> KVManifest:
        """What lies in a block, of all ranks together."""

    @property
    def rank(self) -> int:
        """Of the worker, among those that share the model."""

    @property
    def tensor(self) -> torch.Tensor:
        """`[num_blocks, num_layers, ...]`, contiguous; stays where it is."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of the blocks of one cache.

    Attributes:
        device_id: of a GPU's memory; 0 in host memory.
    """

    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> KVLayout:
        """The layout of a cache `[num_blocks, num_layers, ...]`, contiguous."""
        assert kv_cache.is_contiguous()
        return cls(
            base_address=kv_cache.data_ptr(),
            block_bytes=kv_cache[0].nbytes,
            num_blocks=len(kv_cache),
            device_id=max(kv_cache.get_device(), 0),
        )

    def descriptors(self, ranges: Ranges | None = None) -> npt.NDArray[np.uint64]:
        """(address, bytes, device) of every block, or of these ranges of each, block by block.

        `[num_blocks * len(ranges), 3]`
        """
        within = np.array(ranges or ((0, self.block_bytes),), dtype=np.uint64)
        blocks = np.arange(self.num_blocks, dtype=np.uint64) * np.uint64(self.block_bytes)
        table = np.empty((self.num_blocks, len(within), 3), dtype=np.uint64)
        table[:, :, 0] = np.uint64(self.base_address) + blocks[:, None] + within[:, 0]
        table[:, :, 1] = within[:, 1]
        table[:, :, 2] = self.device_id
        return table.reshape(-1, 3)
