"""torch.cuda as graphs and streams use it, without a GPU: streams, a pool, free memory, no time.

Refuses to know: what is computed. A body that multiplies on a stream says so with `multiply`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

MIB = 2**20
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS on Hopper, for each stream


class OnDevice(torch.Tensor):
    """Host memory that claims to be a GPU's: ``tensor.as_subclass(OnDevice)``."""

    is_cuda = True


class FakeStream:
    """One stream.

    Attributes:
        num_waits: number of waits for the stream.
    """

    def __init__(self, device: object = None) -> None:
        self.device = device
        self.num_waits = 0

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        self.num_waits += 1


class FakeCuda:
    """A device with free memory, on which streams take workspaces and graphs stay.

    Attributes:
        free_bytes: free memory of the device.
        workspaces: streams on which something was multiplied.
        stream: the current stream.
        main: the stream on which steps are launched.
        captures: calls to graphs that are captured by hand, by name.
    """

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.workspaces: set[FakeStream] = set()
        self.streams: list[FakeStream] = []
        self.captures: list[str] = []
        self.stream = self.main = FakeStream()

    def multiply(self, *_: object) -> None:
        """Take memory for a stream's workspace, as cuBLAS does."""
        if self.stream not in self.workspaces:
            self.workspaces.add(self.stream)
            self.free_bytes -= WORKSPACE_BYTES

    def make_stream(self, device: object = None, **_: object) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def capturing(self, graph: object, *, stream: FakeStream, **_: object) -> Iterator[None]:
        with self.on_stream(stream):
            yield

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for `torch.cuda`."""
        calls: dict[str, Callable[..., Any]] = {
            "graph_pool_handle": lambda: None,
            "Stream": self.make_stream,
            "stream": self.on_stream,
            "CUDAGraph": lambda: _Graph(self.captures),
            "graph": self.capturing,
            "current_stream": lambda device=None: self.stream,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
            "set_sync_debug_mode": lambda mode: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (self.free_bytes, 80 * 2**30),
        }
        for name, call in calls.items():
            monkeypatch.setattr(torch.cuda, name, call)


class _Graph:
    def __init__(self, captures: list[str]) -> None:
        self._captures = captures

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "others use the device meanwhile"
        self._captures.append("begin")

    def capture_end(self) -> None:
        self._captures.append("end")

    def replay(self) -> None: ...
