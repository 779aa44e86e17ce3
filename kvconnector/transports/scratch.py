"""Scratch: memory beside the KV cache, and of its kind, that a peer's self-test is written to.

    row 0          this process's own pattern; written to peers, and never changed
    row 1 + slot   what one peer writes

No block of KV lies here. So a write that lands late, of a peer that was given up or has died,
spoils another peer's test at most: its pattern is not that peer's. (Where a transport can refuse a
write, not even that: a slot is written by whom it was lent to.)
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from kvconnector.layout import KVLayout
from kvconnector.peer_info import NUM_SLOTS
from kvconnector.transports.side_stream import SideStream

SLOT_BYTES = 2 * 2**20


class Scratch:
    """The scratch memory of one process start.

    Args:
        engine_id: which the pattern is drawn from.
        kv_cache: on whose device it lies.
        slot_bytes: of each row.

    Attributes:
        memory: ``[1 + NUM_SLOTS, slot_bytes]``, bytes; stays where it is.
        digest: xxh3-64 of the pattern.
    """

    def __init__(
        self, engine_id: str, kv_cache: torch.Tensor, slot_bytes: int = SLOT_BYTES
    ) -> None:
        random = np.random.default_rng(xxhash.xxh3_64_intdigest(engine_id.encode()))
        pattern = random.integers(0, 256, slot_bytes, dtype=np.uint8)
        self.digest = xxhash.xxh3_64_digest(pattern.data)
        self._borrowers: dict[int, str] = {}  # by slot
        shape = (1 + NUM_SLOTS, slot_bytes)
        # A peer's write knows nothing of streams: what is done here has been done on return.
        self._side_stream = SideStream(kv_cache)
        with self._side_stream.entered():
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=kv_cache.device)
            with torch.inference_mode():
                self.memory[0] = torch.from_numpy(pattern)

    @property
    def is_on_device(self) -> bool:
        """Whether it is a GPU's memory."""
        return self.memory.is_cuda

    @property
    def layout(self) -> KVLayout:
        """Where the rows lie."""
        return scratch_layout(
            self.memory.data_ptr(), self.memory.shape[1], max(self.memory.get_device(), 0)
        )

    def may_write(self, slot: int, engine_id: str) -> bool:
        """Whether this peer may write there; for transports that can refuse a write."""
        return self._borrowers.get(slot, engine_id) == engine_id

    def lend(self, slot: int, engine_id: str) -> None:
        """Make sure that what is found there later was written later, and by this peer.

        On a transport that writes into memory by itself, others may write there nonetheless.
        """
        self._borrowers[slot] = engine_id
        with self._side_stream.entered(), torch.inference_mode():
            self.memory[1 + slot].zero_()

    def digest_of(self, slot: int) -> bytes:
        """xxh3-64 of what was written there."""
        with self._side_stream.entered():
            written = self.memory[1 + slot].cpu()
        return xxhash.xxh3_64_digest(written.numpy().data)


def scratch_layout(base_address: int, slot_bytes: int, device_id: int) -> KVLayout:
    """The rows of somebody's scratch memory, as if each were a block."""
    return KVLayout(
        base_address=base_address,
        block_bytes=slot_bytes,
        num_blocks=1 + NUM_SLOTS,
        device_id=device_id,
    )
