"""What one rank's process does for the parts in gpu_ranks.py; rank 0 prints the results as JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton_kernels.triton.ranks.measured import NCCL, ONE_PASS, TWO_PASSES, MeasuredSum
from models.parallel.group import Collective
from models.parallel.host_group import HostGroup
from models.parallel.mapped_group import MappedGroup
from models.parallel.torch_group import TorchGroup, open_store

SUM_BYTES = (2**13, 2**15, 2**17, 2**19, 2**21, 2**23, 2**25)
TIMED_SUMS, NUM_ROUNDS = 20, 7  # sums in a captured graph; timed replays of the graph
NUM_REPLAYS = 50
REPLAYED_SIZES = (1000, 400_000)  # elements in bfloat16: a sum in one pass, and one in two passes


def check_replays(rank: str, size: str, folder: str, name: str) -> None:
    """Replay captured sums of ranks on one GPU; count results that are not the sum in order."""
    device = _begin(name)
    others = TorchGroup(int(rank), int(size), folder, "others", torch.device("cpu"))
    group = _map(HostGroup(others), device, folder, {})
    wrong = 0
    for num_elements in REPLAYED_SIZES:
        part = torch.zeros(num_elements, dtype=torch.bfloat16, device=device)
        drawn, summed = torch.zeros_like(part), torch.zeros_like(part)

        def add(part: Tensor = part, drawn: Tensor = drawn, summed: Tensor = summed) -> None:
            part.copy_(drawn)
            summed.copy_(group.all_reduce(part))

        graph = _capture(add)
        for replay in range(NUM_REPLAYS):
            parts = [_draw(num_elements, replay, other) for other in range(group.size)]
            drawn.copy_(parts[group.rank])
            graph.replay()
            expected = torch.zeros(num_elements)
            for one in parts:
                expected += one.float()
            wrong += not torch.equal(summed.cpu(), expected.bfloat16())
    group.raise_if_stopped()
    _end(group, {"wrong": wrong})


def time_sums(rank: str, size: str, folder: str, name: str) -> None:
    """Measure a sum's microseconds in captured graphs, by size and way."""
    device = _begin(name)
    nccl = TorchGroup(int(rank), int(size), folder, "nccl", device)
    groups: dict[str, Collective] = {NCCL: nccl}
    for way in (ONE_PASS, TWO_PASSES):
        groups[way] = _map(nccl, device, folder, {way: 1.0})
    us: dict[str, dict[str, float]] = {}
    for num_bytes in SUM_BYTES:
        part = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        us[str(num_bytes)] = {
            way: _time(partial(group.all_reduce, part)) for way, group in groups.items()
        }
    _end(nccl, us)


def _begin(name: str) -> torch.device:
    device = torch.device(name)
    torch.cuda.set_device(device)
    return device


def _map(
    others: Collective, device: torch.device, folder: str, us: dict[str, float]
) -> MappedGroup:
    """Make a group; ``us`` with one way makes all sums take this way."""
    ways = "-".join(us) or "any"
    store = open_store(folder, f"mapped-{ways}", others.size)
    rows = [MeasuredSum("any", others.size, 2**20, us)] if us else []
    return MappedGroup(others, device, store, rows)


def _draw(num_elements: int, replay: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * replay + rank)
    return torch.randn(num_elements, generator=draw).bfloat16()


def _capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run once on a side stream, so that kernels are compiled, and capture a graph."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def _time(add: Callable[[], object]) -> float:
    """Return the median microseconds of one call, in a captured graph of many calls."""

    def add_all() -> None:
        for _ in range(TIMED_SUMS):
            add()

    graph = _capture(add_all)
    times: list[float] = []
    for _ in range(NUM_ROUNDS):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / TIMED_SUMS)
    return statistics.median(times)


def _end(group: Collective, results: Mapping[str, object]) -> None:
    group.broadcast(torch.zeros(1, device=torch.cuda.current_device()), 0)
    torch.cuda.synchronize()  # all ranks have computed all sums
    if group.rank == 0:
        print(json.dumps(results), flush=True)
    os._exit(0)  # graphs that hold NCCL's sums would delay the end
