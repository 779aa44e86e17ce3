"""SideStream: reads and clears KV memory on a GPU without waiting for the steps launched there.

Work on the stream that steps use begins when all of them have ended. What is read here is complete
already: a fence was asked, or a peer has said so. Refuses to know: what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of its own where memory is a GPU's; nothing where it is not.

    Args:
        memory: that is read.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._stream = (
            torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
            if memory.is_cuda
            else None
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is launched here goes there, and has been done at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
