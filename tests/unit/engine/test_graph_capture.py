"""Unit tests of the estimated memory of graphs, on a simulated device with free bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
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
from tests.fakes.engine.cuda import MIB, WORKSPACE_BYTES, FakeCuda

FIRST_BYTES, EACH_BYTES = 500 * MIB, 2 * MIB


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda(free_bytes=70 * 2**30)
    cuda.install(monkeypatch)
    monkeypatch.setattr(graph_capture, "_multiply", cuda.multiply)
    capture_stream.cache_clear()
    yield cuda
    capture_stream.cache_clear()  # no other test is to get one of these


class DecodeGraphs:
    """Graphs that multiply; the first takes more than any other."""

    def __init__(self, cuda: FakeCuda, sizes: Sequence[int]) -> None:
        self._cuda = cuda
        self.capturable = tuple(sizes)
        self._captured: set[int] = set()

    def capture(
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


class PromptGraphs:
    """Each takes as much as one of the others."""

    def __init__(self, cuda: FakeCuda, sizes: Sequence[int]) -> None:
        self._cuda = cuda
        self.capturable = tuple(sizes)

    def capture(
        self, capture: Callable[[Callable[..., None]], Sequence[object]], sizes: Sequence[int]
    ) -> None:
        def body(cut: Callable[[], None]) -> None:
            self._cuda.multiply()
            cut()
            self._cuda.multiply()

        for _ in sizes:
            assert len(capture(body)) == 2
        self._cuda.free_bytes -= EACH_BYTES


def make_runner(
    cuda: FakeCuda, sizes: Sequence[int] = captured_sizes(256), chunks: Sequence[int] = ()
) -> ModelRunner:
    return cast(
        ModelRunner,
        SimpleNamespace(
            decode_graphs=DecodeGraphs(cuda, sizes), chunk_graphs=PromptGraphs(cuda, chunks)
        ),
    )


def test_a_workspace_of_cublas_is_no_graphs(cuda: FakeCuda) -> None:
    found = measure_graph_bytes(lambda: make_runner(cuda))
    sizes = len(captured_sizes(256))
    assert found == FIRST_BYTES + EACH_BYTES * (sizes - 1)
    assert WORKSPACE_BYTES * sizes > 2**30  # what it would be off by


def test_each_kind_of_graph_takes_memory(cuda: FakeCuda) -> None:
    def measure(sizes: Sequence[int], chunks: Sequence[int]) -> int:
        return measure_graph_bytes(lambda: make_runner(cuda, sizes, chunks))

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
