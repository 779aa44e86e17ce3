"""SideStream: reads and clears GPU memory without waiting for the model's launched steps.

Work on the steps' own CUDA stream would begin only after all launched steps. The memory that is
read here is already complete: a CUDA event or a peer's message has confirmed this. Refuses to know:
the meaning of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A separate CUDA stream for one tensor on a GPU; does nothing for a tensor in host memory.

    Args:
        memory: the tensor to read or clear.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._stream = (
            torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
            if memory.is_cuda
            else None
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the GPU work of a ``with`` block on the side stream; wait for it at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
