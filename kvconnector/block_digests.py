"""BlockDigests: keyed digests of KV blocks, read from the memory that they lie in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from kvconnector.blocks import LayerRange
from kvconnector.layout import KVMemory
from kvconnector.protocol.digests import Written
from kvconnector.protocol.pair_keys import BlockKey
from kvconnector.transports.side_stream import SideStream


class BlockDigests:
    """Keyed digests of blocks, or of some of their layers, read from a cache.

    Args:
        memory: where the blocks lie.
    """

    def __init__(self, memory: KVMemory) -> None:
        kv_cache = memory.tensor
        num_blocks, self.num_layers = kv_cache.shape[:2]
        self._layers = kv_cache.view(num_blocks, self.num_layers, -1).view(torch.uint8)
        self._layer_bytes = self._layers.shape[2]
        self._side_stream = SideStream(kv_cache)
        # A slice of it costs a tenth of one of the tensor, and they are cut by the thousand.
        self._memory = None if kv_cache.is_cuda else self._layers.view(-1).numpy().data

    def of(self, block_ids: Sequence[int], written: Written, key: BlockKey) -> bytes:
        """``DIGEST_BYTES`` for each block."""
        parts = zip(
            written.numbers,
            written.contexts(),
            self._read(block_ids, written.layers),
            strict=True,
        )
        return b"".join(key.digest(number, context, part) for number, context, part in parts)

    def _read(self, block_ids: Sequence[int], layers: LayerRange) -> Iterator[memoryview]:
        first, end = (layer * self._layer_bytes for layer in layers)
        if self._memory is None:
            with self._side_stream.entered():
                copied = self._layers[list(block_ids), slice(*layers)].cpu()
            yield from (block.data for block in copied.view(len(block_ids), -1).numpy())
            return
        block_bytes = self.num_layers * self._layer_bytes
        for block_id in block_ids:
            yield self._memory[block_id * block_bytes + first : block_id * block_bytes + end]


def digests_are_wanted(option: bool | None, kv_connector: str) -> bool:
    """Whether blocks are checked: as the option says, else where KV leaves loopback unprotected.

    NIXL's UCX stays there unless UCX_NET_DEVICES names another device (`nixl/agent.py`).
    """
    if option is not None:
        return option
    devices = os.environ.get("UCX_NET_DEVICES", "lo").split(",")
    return kv_connector == "nixl" and any(device.strip() != "lo" for device in devices)
