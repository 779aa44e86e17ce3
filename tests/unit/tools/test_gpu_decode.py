"""Tests of busy and idle times in the GPU suite, on a device whose times are known."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

REPLAY_MS, UPLOAD_HOST_MS, SCHEDULE_HOST_MS = 2.0, 1.0, 4.0


class Device:
    """Does what is launched in order, as soon as it is launched; the host has a clock, too."""

    def __init__(self) -> None:
        self.host_ms = self.done_at_ms = 0.0

    def launch(self, milliseconds: float) -> None:
        self.done_at_ms = max(self.done_at_ms, self.host_ms) + milliseconds

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    """A point in the device's work, reached in order."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_ms = 0.0

    def record(self) -> None:
        self._device.launch(0)
        self.at_ms = self._device.done_at_ms

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_waiting_for_the_host_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_decode = importlib.import_module("benchmarks.gpu.gpu_decode")
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Graphs:
        """Stand in for `StepGraphs`: upload for a while, then replay."""

        def __init__(self) -> None:
            self._replays = {4: lambda: device.launch(REPLAY_MS)}

        def replay(self, staged: object) -> tuple[None, None]:
            device.host_ms += UPLOAD_HOST_MS
            self._replays[4]()
            return None, None

    graphs = Graphs()
    runner = SimpleNamespace(decode_graphs=SimpleNamespace(graphs=graphs))
    timer = gpu_decode.ReplayTimer(
        SimpleNamespace(executor=SimpleNamespace(worker=SimpleNamespace(runner=runner)))
    )
    for _ in range(5):
        device.host_ms += SCHEDULE_HOST_MS
        graphs.replay(None)
    busy, gaps = timer.take_ms()
    assert busy == [REPLAY_MS] * 5
    assert gaps == [SCHEDULE_HOST_MS + UPLOAD_HOST_MS - REPLAY_MS] * 4
    assert timer.take_ms() == ([], [])
