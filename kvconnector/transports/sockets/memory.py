"""Memory access for sockets: reads the bytes of blocks, and writes bytes into blocks.

Host memory is read and written in place. GPU memory is copied through pinned host memory, with one
staging buffer per write. Arriving bytes are written only while their transfer has a grant. A grant
can end in the middle of a payload, so it is checked for each piece of the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvconnector.blocks import LayerRange
from kvconnector.transports.sockets.frames import Sink

_DISCARD_BYTES = 2**16
MayWrite = Callable[[], bool]


class BlockMemory(Protocol):
    """Reads and writes blocks as bytes. The caller has checked block ids and layers."""

    def num_bytes(self, num_blocks: int, layers: LayerRange | None) -> int:
        """Return the size of ``num_blocks`` blocks, or of some of their layers, in bytes."""

    def read(self, block_ids: Sequence[int], layers: LayerRange | None) -> list[memoryview]:
        """Return the bytes of the blocks, in this order; valid until the blocks change."""

    def sink(
        self, block_ids: Sequence[int], layers: LayerRange | None, may_write: MayWrite
    ) -> Sink:
        """Return a sink that writes bytes into the blocks while ``may_write`` returns True.

        The sink drops all later bytes.
        """


def memory_of(blocks: torch.Tensor) -> BlockMemory:
    """Return access to the memory of a contiguous tensor `[num_blocks, num_layers, ...]`."""
    return StagedMemory(blocks) if blocks.is_cuda else HostMemory(blocks)


class _Spans:
    """A payload's destination: ranges of memory, filled in order while ``may_write`` is true."""

    def __init__(self, spans: list[memoryview], may_write: MayWrite) -> None:
        self._spans = spans[::-1]
        self._may_write = may_write
        self._is_taken = True
        self._nowhere = memoryview(b"")

    def buffer(self) -> memoryview:
        if self._is_taken and not self._may_write():
            self._is_taken = False  # `_Staged` checks once more at the end of the payload
            self._nowhere = memoryview(bytearray(_DISCARD_BYTES))
        if self._is_taken:
            return self._spans[-1]
        return self._nowhere[: len(self._spans[-1])]

    def advance(self, num_bytes: int) -> None:
        left = self._spans[-1][num_bytes:]
        if left:
            self._spans[-1] = left
        else:
            self._spans.pop()

    def finish_payload(self) -> bool:
        return self._is_taken


class Discard:
    """The destination of a payload whose bytes are dropped."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._nowhere = memoryview(bytearray(min(num_bytes, _DISCARD_BYTES)))

    def buffer(self) -> memoryview:
        return self._nowhere[: self._left]

    def advance(self, num_bytes: int) -> None:
        self._left -= num_bytes

    def finish_payload(self) -> bool:
        return False


class HostMemory:
    """Reads and writes blocks in host memory."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._block_bytes = blocks[0].nbytes
        self._layer_bytes = self._block_bytes // blocks.shape[1]
        self._bytes = _view(blocks)

    def num_bytes(self, num_blocks: int, layers: LayerRange | None) -> int:
        if layers is None:
            return num_blocks * self._block_bytes
        return num_blocks * self._layer_bytes * (layers[1] - layers[0])

    def read(self, block_ids: Sequence[int], layers: LayerRange | None) -> list[memoryview]:
        first = 0 if layers is None else layers[0] * self._layer_bytes
        length = self.num_bytes(1, layers)
        spans: list[tuple[int, int]] = []  # (from, to)
        for block_id in block_ids:
            start = block_id * self._block_bytes + first
            if spans and spans[-1][1] == start:  # join adjacent ranges
                spans[-1] = (spans[-1][0], start + length)
            else:
                spans.append((start, start + length))
        return [self._bytes[start:end] for start, end in spans]

    def sink(
        self, block_ids: Sequence[int], layers: LayerRange | None, may_write: MayWrite
    ) -> Sink:
        return _Spans(self.read(block_ids, layers), may_write)


class StagedMemory:
    """Reads and writes blocks on any device through a buffer in host memory (pinned for a GPU)."""

    def __init__(self, blocks: torch.Tensor) -> None:
        num_blocks, self._num_layers = blocks.shape[:2]
        self._blocks = blocks.view(num_blocks, self._num_layers, -1).view(torch.uint8)
        self._block_bytes = blocks[0].nbytes

    def num_bytes(self, num_blocks: int, layers: LayerRange | None) -> int:
        first, end = layers or (0, self._num_layers)
        return num_blocks * self._block_bytes // self._num_layers * (end - first)

    def read(self, block_ids: Sequence[int], layers: LayerRange | None) -> list[memoryview]:
        staged = self._stage(len(block_ids), layers)
        with torch.inference_mode():
            # Waits until the copy is complete
            staged.copy_(self._blocks[list(block_ids), _part(layers)])
        return [_view(staged)]

    def sink(
        self, block_ids: Sequence[int], layers: LayerRange | None, may_write: MayWrite
    ) -> Sink:
        staged = self._stage(len(block_ids), layers)

        def store() -> None:
            with torch.inference_mode():
                self._blocks[list(block_ids), _part(layers)] = staged.to(self._blocks.device)
            if self._blocks.is_cuda:  # the copy must be complete before it is reported
                torch.cuda.current_stream(self._blocks.device).synchronize()

        return _Staged([_view(staged)], may_write, store)

    def _stage(self, num_blocks: int, layers: LayerRange | None) -> torch.Tensor:
        first, end = layers or (0, self._num_layers)
        shape = (num_blocks, end - first, self._blocks.shape[2])
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._blocks.is_cuda)


class _Staged(_Spans):
    """A payload's destination in host memory; the complete payload is copied to the device."""

    def __init__(
        self, spans: list[memoryview], may_write: MayWrite, store: Callable[[], None]
    ) -> None:
        super().__init__(spans, may_write)
        self._store = store

    def finish_payload(self) -> bool:
        if not (self._is_taken and self._may_write()):
            return False
        self._store()
        return True


def _part(layers: LayerRange | None) -> slice:
    return slice(None) if layers is None else slice(*layers)


def _view(host: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the host as bytes."""
    return host.view(-1).view(torch.uint8).numpy().data
