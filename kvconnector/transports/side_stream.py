"""SideStream: reads and clears KV memory on a GPU without waiting for launched steps.

Work on the CUDA stream of the steps would begin only after all launched steps. The memory that is
read here is already complete: a fence or a peer has confirmed it. Refuses to know: the meaning of
the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A separate CUDA stream for GPU memory; does nothing for host memory.

    Args:
        memory: the memory to read.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._stream = (
            torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
            if memory.is_cuda
            else None
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block's GPU work on the side stream; wait for the work at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
