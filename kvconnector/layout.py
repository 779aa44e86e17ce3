"""Where a block lies in a KV cache's memory. The one other place that knows the cache's layout.

The cache is block-major (`engine/kv_cache.py`), so block i is one contiguous range:

    base_address + i * block_bytes  ..  base_address + (i + 1) * block_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of the blocks of one cache.

    Attributes:
        fingerprint: equal for caches whose blocks can be copied byte by byte.
        device_id: of a GPU's memory; 0 in host memory.
    """

    base_address: int
    block_bytes: int
    block_size: int
    num_blocks: int
    device_id: int
    fingerprint: str

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> KVLayout:
        """The layout of a cache `[num_blocks, ..., block_size, head_dim]`, contiguous."""
        assert kv_cache.is_contiguous()
        num_blocks = kv_cache.shape[0]
        shape = "x".join(str(size) for size in kv_cache.shape[1:])
        return cls(
            base_address=kv_cache.data_ptr(),
            block_bytes=kv_cache[0].nbytes,
            block_size=kv_cache.shape[-2],
            num_blocks=num_blocks,
            device_id=max(kv_cache.get_device(), 0),
            fingerprint=f"block-major:{shape}:{str(kv_cache.dtype).removeprefix('torch.')}",
        )

    def descriptors(self) -> npt.NDArray[np.uint64]:
        """(address, bytes, device) of every block, `[num_blocks, 3]`."""
        table = np.empty((self.num_blocks, 3), dtype=np.uint64)
        table[:, 0] = self.base_address + np.arange(self.num_blocks) * self.block_bytes
        table[:, 1] = self.block_bytes
        table[:, 2] = self.device_id
        return table


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError unless all ids are blocks: a bad address can kill the receiver."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        raise ValueError(f"block ids must be 0 to {num_blocks - 1}, got {list(block_ids)[:8]}")
