"""Unit tests of what graphs are taken to cost: on a device that is a number of free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest

from engine.worker import graph_capture
from engine.worker.cuda_graphs import captured_sizes
from engine.worker.graph_capture import (
    CaptureError,
    DeviceCapture,
    capture_stream,
    measure_graph_bytes,
)
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

    def __init__(
        self, cuda: FakeCuda, sizes: Sequence[int] = captured_sizes(256), chunks: Sequence[int] = ()
    ) -> None:
        self._cuda = cuda
        self.capturable_sizes, self.capturable_chunks = tuple(sizes), tuple(chunks)
        self._captured: set[int] = set()

    def capture_graphs(
        self, capture: Callable[[Callable[[], None]], object], sizes: Sequence[int]
    ) -> None:
        self._cuda.free_bytes += self._held  # those of before are forgotten
        self._captured = set(sizes)
        self._cuda.free_bytes -= self._held
        for _ in sizes:
            capture(self._cuda.multiply)

    def capture_chunks(
        self, capture: Callable[[Callable[..., None]], Sequence[object]], sizes: Sequence[int]
    ) -> None:
        """Each takes as much as one of the others."""

        def body(cut: Callable[[], None]) -> None:
            self._cuda.multiply()
            cut()
            self._cuda.multiply()

        for _ in sizes:
            assert len(capture(body)) == 2
        self._cuda.free_bytes -= EACH_BYTES

    @property
    def _held(self) -> int:
        return FIRST_BYTES + EACH_BYTES * (len(self._captured) - 1) if self._captured else 0


def test_a_workspace_of_cublas_is_no_graphs(cuda: FakeCuda) -> None:
    found = measure_graph_bytes(lambda: cast(ModelRunner, Runner(cuda)))
    sizes = len(captured_sizes(256))
    assert found == FIRST_BYTES + EACH_BYTES * (sizes - 1)
    assert WORKSPACE_BYTES * sizes > 2**30  # what it would be off by


def test_each_kind_of_graph_takes_memory(cuda: FakeCuda) -> None:
    def measure(sizes: Sequence[int], chunks: Sequence[int]) -> int:
        return measure_graph_bytes(lambda: cast(ModelRunner, Runner(cuda, sizes, chunks)))

    chunks = (128, 256, 384, 512)
    assert measure((), ()) == 0
    assert measure((), chunks) == EACH_BYTES * len(chunks)
    assert measure((1, 2), chunks) == FIRST_BYTES + EACH_BYTES * (1 + len(chunks))
    assert measure((1,), ()) == FIRST_BYTES


def test_a_step_is_captured_in_the_pieces_that_it_is_cut_in(cuda: FakeCuda) -> None:
    computed: list[str] = []

    def body(cut: Callable[[], None]) -> None:
        computed.append("first")
        cut()
        computed.append("second")

    pieces = DeviceCapture().pieces(body)
    assert len(pieces) == 2
    assert computed == ["first", "second"] * 3  # twice before: to compile, and to look for waits
    assert cuda.captures == ["begin", "end"] * 2


def test_a_step_that_fails_while_it_is_captured_ends_the_capture(cuda: FakeCuda) -> None:
    calls = 0

    def body(cut: Callable[[], None]) -> None:
        nonlocal calls
        calls += 1
        cut()
        if calls == 3:
            raise RuntimeError("not permitted while capturing")

    with pytest.raises(CaptureError, match="a step cannot be captured: not permitted"):
        DeviceCapture().pieces(body)
    assert cuda.captures == ["begin", "end"] * 2


def test_all_captures_of_a_process_share_one_stream(cuda: FakeCuda) -> None:
    for _ in range(5):
        DeviceCapture()(cuda.multiply)
    assert len(cuda.streams) == len(cuda.workspaces) == 1
