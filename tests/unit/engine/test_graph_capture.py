"""Unit tests of what graphs are taken to cost: on a device that is a number of free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest

from engine.worker import graph_capture
from engine.worker.cuda_graphs import captured_sizes
from engine.worker.graph_capture import DeviceCapture, capture_stream, measure_graph_bytes
from engine.worker.model_runner import ModelRunner
from tests.fakes.cuda import MIB, WORKSPACE_BYTES, FakeCuda

FIRST_BYTES, EACH_BYTES = 500 * MIB, 2 * MIB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda(free_bytes=70 * 2**30)
    cuda.install(monkeypatch)
    monkeypatch.setattr(graph_capture, "_multiply", cuda.multiply)
    capture_stream.cache_clear()
    yield cuda
    capture_stream.cache_clear()  # no other test is to get one of these


class Runner:
    """Has graphs that multiply; the first takes more than any other."""

    capturable_sizes = captured_sizes(256)

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._captured: set[int] = set()

    def capture_graphs(
        self, capture: Callable[[Callable[[], None]], object], sizes: Sequence[int]
    ) -> None:
        self._cuda.free_bytes += self._held  # those of before are forgotten
        self._captured = set(sizes)
        self._cuda.free_bytes -= self._held
        for _ in sizes:
            capture(self._cuda.multiply)

    @property
    def _held(self) -> int:
        return FIRST_BYTES + EACH_BYTES * (len(self._captured) - 1) if self._captured else 0


def test_a_workspace_of_cublas_is_no_graphs(cuda: FakeCuda) -> None:
    found = measure_graph_bytes(lambda: cast(ModelRunner, Runner(cuda)))
    sizes = len(captured_sizes(256))
    assert found == FIRST_BYTES + EACH_BYTES * (sizes - 1)
    assert WORKSPACE_BYTES * sizes > 2**30  # what it would be off by


def test_all_captures_of_a_process_share_one_stream(cuda: FakeCuda) -> None:
    for _ in range(5):
        DeviceCapture()(cuda.multiply)
    assert len(cuda.streams) == len(cuda.workspaces) == 1
