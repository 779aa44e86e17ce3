"""One rank of the tests of sums in mapped memory, in a process of its own.

    python -m tests.kernels.rank_process RANK SIZE FOLDER TASK:NUM ...

Prints the results of the tasks in one line of JSON. NUM is the number of sums of a task::

    sums        count wrong sums
    FAULT       count wrong sums with a fault in the protocol, see `FAULTS`
    wrap        count wrong sums whose meetings have numbers around 2**31
    abort       rank 1 is gone, and rank 0 is told
    give up     rank 1 is gone, and rank 0 waits too long

Without a GPU, Triton's interpreter runs the kernels in memory that the processes share; with a GPU,
all ranks are on one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton asks for it when it is imported

import triton
import triton.language as tl

from baton_kernels.triton.ranks import collectives
from baton_kernels.triton.ranks.measured import MeasuredSum
from models.parallel.group import CollectiveError
from models.parallel.mapped_group import MappedGroup
from models.parallel.torch_group import TorchGroup, open_store

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# Small areas, so that sums of a few hundred elements have several programs and several calls.
BLOCK, PROGRAMS = 16, 2
# Sums of more than 256 bytes take two passes.
ROWS = (
    MeasuredSum("any", 2, 64, {"one_pass": 1.0, "two_passes": 2.0, "nccl": 3.0}),
    MeasuredSum("any", 2, 1024, {"one_pass": 2.0, "two_passes": 1.0, "nccl": 3.0}),
)
# The interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")
MOST_ELEMENTS = 200

is_interpreted = DEVICE.type == "cpu"
meet, area_of = collectives.meet, collectives.area_of
wait_for_flags = collectives.wait_for_flags


@triton.jit  # type: ignore[untyped-decorator]
def meet_unless_first(
    regions: Any, program: Any, number: Any, stop: Any, rank: Any, max_spins: Any,
    SIZE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Leave out the first meeting of each call."""
    if number % 2 == 0:
        meet(regions, program, number, stop, rank, max_spins, SIZE, LANES)


@triton.jit  # type: ignore[untyped-decorator]
def meet_unless_second(
    regions: Any, program: Any, number: Any, stop: Any, rank: Any, max_spins: Any,
    SIZE: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Leave out the second meeting of each call."""
    if number % 2 != 0:
        meet(regions, program, number, stop, rank, max_spins, SIZE, LANES)


@triton.jit  # type: ignore[untyped-decorator]
def area_without_turns(
    regions: Any, rank: Any, index: Any, like: Any, AREA: tl.constexpr, FLAGS: tl.constexpr
) -> Any:
    """Return the same area in all calls."""
    return area_of(regions, rank, index // 2 * 2, like, AREA, FLAGS)


FAULTS: dict[str, dict[str, Any]] = {
    "no first meeting": {"meet": meet_unless_first},
    "no second meeting": {"meet": meet_unless_second},
    "one slot": {"area_of": area_without_turns},
}


def pause_at_random(meeting: Callable[..., None], seed: int) -> Callable[..., None]:
    """Return a meeting around which this rank sometimes pauses, so that the other is ahead."""
    draw = random.Random(seed)

    def pause() -> None:
        if draw.random() < 0.1:
            time.sleep(0.005 * draw.random())

    def meet_with_pauses(*arguments: object) -> None:
        pause()
        meeting(*arguments)
        pause()

    return meet_with_pauses


def wait_politely(*arguments: object) -> None:
    """Give the core to another rank before waiting, since the interpreter's rounds take long."""
    time.sleep(0.0002)
    wait_for_flags(*arguments)


def make_group(rank: int, size: int, folder: str, max_spins: int) -> MappedGroup:
    others = TorchGroup(rank, size, folder, "others", torch.device("cpu"))
    shape = collectives.RegionShape(size, PROGRAMS, BLOCK, 4 * BLOCK * size * 2)
    store = open_store(folder, "mapped", size)
    return MappedGroup(others, DEVICE, store, ROWS, shape=shape, max_spins=max_spins)


def parts_of(seed: int, call: int, size: int) -> list[torch.Tensor]:
    """Draw the parts of all ranks for one sum."""
    draw = torch.Generator().manual_seed(seed * 100_000 + call)
    number, dtype = (int(torch.randint(0, 2**20, (1,), generator=draw)) for _ in range(2))
    num_elements = 1 + number % (16 if number % 3 == 0 else MOST_ELEMENTS)
    if number % 2:
        num_elements = -(-num_elements // 16) * 16
    drawn = torch.randn(size, num_elements, generator=draw).mul(10).unbind()
    return [part.to(DTYPES[dtype % len(DTYPES)]) for part in drawn]


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def count_wrong(group: MappedGroup, seed: int, num: int) -> int:
    """Count the sums and gathers, one right after the other, whose bits are not as defined."""
    inputs = [parts_of(seed, call, group.size) for call in range(num)]
    own = [parts[group.rank].clone().to(DEVICE) for parts in inputs]
    gathers = [call % 4 == 3 for call in range(num)]
    found = [
        group.all_gather(part) if is_gather else group.all_reduce(part)
        for part, is_gather in zip(own, gathers, strict=True)
    ]
    expected = [
        torch.stack(parts) if is_gather else sum_in_order(parts)
        for parts, is_gather in zip(inputs, gathers, strict=True)
    ]
    return sum(not torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def how_a_wait_ends(group: MappedGroup, how: str) -> str:
    """Let rank 1 leave; return the error by which rank 0 learns this, or "none"."""
    if group.rank == 1:
        return "left"
    if how == "abort":
        threading.Thread(target=group.abort, daemon=True).start()
    try:
        group.all_reduce(torch.ones(5, device=DEVICE))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            group.raise_if_stopped()
    except CollectiveError as error:
        return str(error)
    return "none"


def run_task(rank: int, size: int, folder: Path, task: str, num: int) -> object:
    """Run a task with a new group; return the number of wrong sums, or how a wait ended."""
    folder.mkdir(exist_ok=True)
    group = make_group(rank, size, str(folder), 300 if task == "give up" else 10**9)
    if task in ("abort", "give up"):
        return how_a_wait_ends(group, task)
    seed = zlib.crc32(folder.name.encode()) % 1000
    if task == "wrap":  # the number of a meeting is twice the number of its call
        group._kernels._shared[1].fill_(2**30 - 3)
        flags = group._regions.own[: 4 * PROGRAMS * size].view(torch.int32)
        flags.fill_(2**31 - 5)
        group.broadcast(torch.ones(1), 0)  # all ranks have filled their flags
    broken = FAULTS.get(task, {})
    with ExitStack() as stack:
        for name, function in broken.items():
            stack.enter_context(mock.patch.object(collectives, name, function))
        if is_interpreted:
            meeting = pause_at_random(collectives.meet, seed + rank)
            stack.enter_context(mock.patch.object(collectives, "meet", meeting))
        return count_wrong(group, seed, num)


def main(rank: int, size: int, folder: Path, tasks: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if is_interpreted:
        collectives.wait_for_flags = wait_politely
    found = []
    for task in tasks:
        name, num = task.split(":")
        found.append(run_task(rank, size, folder / task, name, int(num)))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # groups of ranks that are gone would wait for them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
