"""BlockBytes: the KV cache's blocks as bytes in host memory. Refuses to know: files."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch


class BlockBytes:
    """The blocks of one worker's KV cache as bytes; a `BlockMemory`.

    On a CPU, the bytes are the cache's own memory. On a GPU, the bytes are copies. A separate CUDA
    stream makes the copies, because the steps' stream may have much queued work.

    Args:
        tensor: the KV cache, `[num_blocks, ...]`, contiguous.

    Attributes:
        block_bytes: bytes of a block.
        in_use: held while a thread copies from or to a GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.view(len(tensor), -1).view(torch.uint8)  # [num_blocks, block_bytes]
        self.block_bytes = self._bytes.shape[1]
        self.in_use = Lock()
        self._memory = None if tensor.is_cuda else self._bytes.view(-1).numpy().data
        self._stream = (
            torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            if tensor.is_cuda
            else None
        )

    def contents(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        if self._memory is not None:
            return [self._own(block_id) for block_id in block_ids]
        # Copy one block at a time, so that the copies need no other GPU memory, and a sleep can
        # begin between two copies.
        return [self._copied(block_id) for block_id in block_ids]

    def _copied(self, block_id: int) -> memoryview:
        with self.in_use, torch.cuda.stream(self._stream):
            self._check_allocated()
            return self._bytes[block_id].cpu().numpy().data

    def _check_allocated(self) -> None:
        """Raise an error during a sleep; a kernel that uses freed memory would end the process."""
        if not self._bytes.untyped_storage().nbytes():
            raise RuntimeError("the KV memory is freed during a sleep")

    def room_for(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        if self._memory is not None:
            return [self._own(block_id) for block_id in block_ids]
        room = torch.empty((len(block_ids), self.block_bytes), dtype=torch.uint8)
        return [block.data for block in room.numpy()]

    def put(self, block_ids: Sequence[int], parts: Sequence[memoryview]) -> None:
        if self._stream is None:
            return
        whole = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        with self.in_use, torch.cuda.stream(self._stream):
            self._check_allocated()
            copied = whole.view(len(block_ids), -1).to(self._bytes.device)
            self._bytes[list(block_ids)] = copied
            self._stream.synchronize()

    def _own(self, block_id: int) -> memoryview:
        assert self._memory is not None
        size = self.block_bytes
        return self._memory[block_id * size : (block_id + 1) * size]
