"""Scratch: memory on the KV cache's device that peers' self-tests write to.

    row 0          this process's own pattern: written to peers, never changed
    row 1 + slot   one peer's pattern

Scratch memory does not hold KV blocks, so a dead peer's late write can at worst make another peer's
self-test fail. Transports that can refuse writes prevent even this: only the peer to which a slot
was given may write to it.
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
    """The memory for self-tests of one worker, with the pattern that it writes to peers.

    Args:
        engine_id: seed of this process's pattern.
        kv_cache: the KV cache, on whose device the scratch memory lies.
        slot_bytes: size of each row in bytes.

    Attributes:
        memory: ``[1 + NUM_SLOTS, slot_bytes]`` bytes; never moves.
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
        # A peer's write does not wait for this process's CUDA streams, so each method returns only
        # when its GPU work is complete.
        self._side_stream = SideStream(kv_cache)
        with self._side_stream.entered():
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=kv_cache.device)
            with torch.inference_mode():
                self.memory[0] = torch.from_numpy(pattern)

    @property
    def is_on_device(self) -> bool:
        """Return whether the memory is on a GPU."""
        return self.memory.is_cuda

    @property
    def layout(self) -> KVLayout:
        """Return the addresses of the rows."""
        return scratch_layout(
            self.memory.data_ptr(), self.memory.shape[1], max(self.memory.get_device(), 0)
        )

    def may_write(self, slot: int, engine_id: str) -> bool:
        """Return whether a slot was given to this peer; for transports that can refuse writes."""
        return self._borrowers.get(slot) == engine_id

    def lend(self, slot: int, engine_id: str) -> None:
        """Clear a slot, and give the slot to a peer.

        Transports with one-sided writes cannot keep other peers from writing to the slot.
        """
        self._borrowers[slot] = engine_id
        with self._side_stream.entered(), torch.inference_mode():
            self.memory[1 + slot].zero_()

    def digest_of(self, slot: int) -> bytes:
        """Return the xxh3-64 of a slot's bytes."""
        with self._side_stream.entered():
            written = self.memory[1 + slot].cpu()
        return xxhash.xxh3_64_digest(written.numpy().data)


def scratch_layout(base_address: int, slot_bytes: int, device_id: int) -> KVLayout:
    """Return the layout of scratch memory, with each row as a block."""
    return KVLayout(
        base_address=base_address,
        block_bytes=slot_bytes,
        num_blocks=1 + NUM_SLOTS,
        device_id=device_id,
    )
