"""KVLayout: computes the address of each block in a KV cache's memory.

Only this file and `engine/worker/kv_cache.py` know the cache's layout. The cache is block-major:
block i is one contiguous range, and transfers copy parts of this range:

    base_address + i * block_bytes  ..  base_address + (i + 1) * block_bytes
        + first  ..  + first + num_bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from baton.kv.manifest import KVManifest
from kvconnector.blocks import Ranges

if TYPE_CHECKING:
    import torch


class KVMemory(Protocol):
    """The KV cache of one worker, as seen by a connector."""

    @property
    def manifest(self) -> KVManifest:
        """Return the manifest, which describes one block over all ranks of the model."""

    @property
    def rank(self) -> int:
        """Return this worker's rank among the workers of its model."""

    @property
    def tensor(self) -> torch.Tensor:
        """Return the KV cache `[num_blocks, num_layers, ...]`: contiguous, never moved."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The addresses of all blocks of one worker's KV cache.

    Attributes:
        device_id: number of the GPU; 0 for host memory.
    """

    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> KVLayout:
        """Return the layout of a contiguous cache `[num_blocks, num_layers, ...]`."""
        assert kv_cache.is_contiguous()
        return cls(
            base_address=kv_cache.data_ptr(),
            block_bytes=kv_cache[0].nbytes,
            num_blocks=len(kv_cache),
            device_id=max(kv_cache.get_device(), 0),
        )

    def descriptors(self, ranges: Ranges | None = None) -> npt.NDArray[np.uint64]:
        """Return (address, bytes, device) of every block, or of some byte ranges in every block.

        Shape: `[num_blocks * len(ranges), 3]`, block by block.
        """
        within = np.array(ranges or ((0, self.block_bytes),), dtype=np.uint64)
        blocks = np.arange(self.num_blocks, dtype=np.uint64) * np.uint64(self.block_bytes)
        table = np.empty((self.num_blocks, len(within), 3), dtype=np.uint64)
        table[:, :, 0] = np.uint64(self.base_address) + blocks[:, None] + within[:, 0]
        table[:, :, 1] = within[:, 1]
        table[:, :, 2] = self.device_id
        return table.reshape(-1, 3)
