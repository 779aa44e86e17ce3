"""Measures times of calls: in a CUDA graph on a GPU, or one call on a CPU.

Graphs are used because decode steps also run in graphs, and because launches from Python would hide
what small kernels cost. Times on a CPU mean nothing: there the benchmarks only show that they run.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.runner.run import Run

Call = Callable[[], object]
Row = dict[str, float | str]


def interpret_without_gpu() -> None:
    """Let Triton's interpreter run kernels if there is no GPU; call before importing Triton."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def device_of(run: Run, *, is_dry: bool) -> str:
    """Return the device to measure, and record the GPU's name; raise SystemExit without a GPU."""
    if is_dry:
        return "cpu"
    if not torch.cuda.is_available():
        raise SystemExit("device: there is no CUDA device here; --dry-run tries the benchmark")
    run.environment["gpu"] = torch.cuda.get_device_name("cuda")
    return "cuda"


def median_us(calls: Sequence[Call], device: str, repeat: int = 20) -> float:
    """Return the median microseconds of one call, when all calls run one after another.

    Args:
        calls: the calls; each should use different memory, so that the data is not read from
            caches.
    """
    for call in calls:
        call()  # compiles
    if torch.device(device).type == "cpu":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls) * 1e6
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    samples: list[float] = []
    for _ in range(repeat + 3):
        start: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept, graph
    return statistics.median(samples[3:])


def copy_gb_per_s(device: str, num_bytes: int) -> float:
    """Measure copies within device memory in GB/s, counting both read and written bytes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return gb_per_s(2 * num_bytes, median_us([lambda: target.copy_(source)], device))


def excess_error(found: Tensor, expected: Tensor, atol: float, rtol: float) -> float:
    """Return the largest error beyond ``atol + rtol * |expected|``; infinite for a NaN."""
    found, expected = found.float(), expected.float()
    excess = (found - expected).abs() - (atol + rtol * expected.abs())
    return float(excess.nan_to_num(nan=math.inf).max())


def gb_per_s(num_bytes: int, microseconds: float) -> float:
    """Return the gigabytes (10**9 bytes) per second."""
    return num_bytes / microseconds / 1e3


def num_bytes(*tensors: Tensor) -> int:
    """Return the number of bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
