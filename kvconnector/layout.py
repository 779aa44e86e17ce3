"""Where a block lies in a KV cache's memory. The one other place that knows the cache's layout.

The cache is block-major (`engine/worker/kv_cache.py`), so block i is one contiguous range, and so
are its layers a to b:

    base_address + i * block_bytes  ..  base_address + (i + 1) * block_bytes
        + a * layer_bytes  ..  + b * layer_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

LayerRange = tuple[int, int]  # from the first layer up to, not including, the second


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of the blocks of one cache.

    Attributes:
        fingerprint: equal for caches whose blocks can be copied byte by byte.
        device_id: of a GPU's memory; 0 in host memory.
        num_layers: in a block.
    """

    base_address: int
    block_bytes: int
    block_size: int
    num_blocks: int
    device_id: int
    fingerprint: str
    num_layers: int = 1

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> KVLayout:
        """The layout of a cache `[num_blocks, num_layers, ..., block_size, head_dim]`,
        contiguous."""
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


def layer_groups(num_layers: int, num_groups: int) -> tuple[LayerRange, ...]:
    """Cut layers into at most ``num_groups`` ranges, as equal as can be, the larger ones first.

    What is behind the last range cannot hide behind a layer's computation, so it is no larger.
    """
    num_groups = min(num_groups, num_layers)
    size, larger = divmod(num_layers, num_groups)
    ends = [size * (index + 1) + min(index + 1, larger) for index in range(num_groups)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def count_runs(local: Sequence[int], remote: Sequence[int]) -> int:
    """Ranges of memory that a copy of blocks ``local[i]`` to ``remote[i]`` consists of, when
    neighbours that follow each other on both sides are one."""
    if not local:
        return 0
    steps_on = (np.diff(local) == 1) & (np.diff(remote) == 1)
    return len(local) - int(steps_on.sum())


def check_block_ids(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError unless all ids are blocks: a bad address can kill the receiver."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        raise ValueError(f"block ids must be 0 to {num_blocks - 1}, got {list(block_ids)[:8]}")


def check_layers(layers: LayerRange | None, num_layers: int) -> None:
    """Raise ValueError unless there are such layers, for the same reason."""
    if layers is not None and not 0 <= layers[0] < layers[1] <= num_layers:
        raise ValueError(f"layers: must be a range within 0 to {num_layers}, got {layers}")
