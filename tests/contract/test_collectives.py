"""Contract of every group of ranks: equal bits on all ranks, and an error when a rank is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_kernels.dispatch import native_ops
from models.parallel import torch_group
from models.parallel.group import SINGLE_RANK, Collective, CollectiveError, Ranks
from models.parallel.shared_group import (
    LARGEST_IN_RING,
    RING_SLOTS,
    SLOT_BYTES,
    SharedGroup,
    SharedPointToPoint,
    open_shared,
    share_memory,
)
from models.parallel.torch_group import TorchGroup

pytestmark = pytest.mark.medium

Group = list[Collective]
CPU = torch.device("cpu")


def on_all(group: Group, call: Callable[[Collective], Any]) -> list[Any]:
    """Make a call on all ranks, each on a thread of its own; return the results."""
    with ThreadPoolExecutor(len(group)) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in group]]


def test_sums_on_gpus_do_not_go_through_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether all ranks can was asked with a tensor of the CPU, which NCCL does not take."""
    asked = []
    monkeypatch.setattr(torch_group, "_check_devices", lambda *arguments: False)
    monkeypatch.setattr(torch_group, "TorchGroup", lambda *arguments: SINGLE_RANK)
    monkeypatch.setattr(torch_group, "share_memory", lambda group, shared, _: asked.append(shared))
    for device in ("cuda", "cpu"):
        torch_group.connect(0, 2, 2, str(tmp_path), torch.device(device), shared=3)
    assert asked == [None, 3]


@pytest.fixture(params=[("gloo", 2), ("shared", 2), ("shared", 3), ("shared", 4)], ids=str)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    kind, size = request.param
    descriptor = open_shared(2, size) if kind == "shared" else None
    if kind == "shared" and native_ops() is None:
        pytest.skip("no native kernels here")

    def make(rank: int) -> Collective:
        of_torch = TorchGroup(rank, size, str(tmp_path), "group", CPU)
        return share_memory(of_torch, descriptor, 1)

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(make, range(size)))
    assert all(isinstance(rank, SharedGroup) is (kind == "shared") for rank in ranks)
    yield ranks
    if descriptor is not None:
        os.close(descriptor)


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=draw).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 17), (5, 4096), (3, SLOT_BYTES // 4)], ids=str)
def test_all_ranks_have_the_same_bits_of_a_sum(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    own = parts(len(group), shape, dtype)
    sums = on_all(group, lambda rank: rank.all_reduce(own[rank.rank].clone()))
    assert all(torch.equal(found, sums[0]) for found in sums)
    exact = sum(part.double() for part in own)
    error = (sums[0].double() - exact).abs().max()
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]


def test_a_sum_is_where_the_part_was(group: Group) -> None:
    own = parts(len(group), (4, 8), torch.float32)
    on_all(group, lambda rank: rank.all_reduce(own[rank.rank]))
    assert all(torch.equal(found, own[0]) for found in own)


def test_parts_are_side_by_side_on_all_ranks(group: Group) -> None:
    own = parts(len(group), (2, SLOT_BYTES // 4), torch.float32)
    for found in on_all(group, lambda rank: rank.all_gather(own[rank.rank])):
        assert torch.equal(found, torch.stack(own))


def test_many_sums_one_after_the_other(group: Group) -> None:
    def run(rank: Collective) -> list[float]:
        return [
            float(rank.all_reduce(torch.full((7,), float(rank.rank + i)))[3]) for i in range(300)
        ]

    size = len(group)
    expected = [float(sum(rank + i for rank in range(size))) for i in range(300)]
    assert on_all(group, run) == [expected] * size


def test_one_rank_tells_another(group: Group) -> None:
    sent = torch.arange(5.0)

    def run(rank: Collective) -> torch.Tensor:
        if rank.rank == 0:
            rank.send(sent, 1)
            return sent
        return rank.receive(torch.zeros(5), 0) if rank.rank == 1 else sent

    assert all(torch.equal(found, sent) for found in on_all(group, run))
    heard = on_all(group, lambda rank: rank.broadcast(torch.full((3,), float(rank.rank)), 1))
    assert all(torch.equal(found, torch.ones(3)) for found in heard)


STAGES = {"2 stages": (2, 1), "3 stages": (3, 1), "2 stages of 2": (2, 2)}
SIZES = (
    3,
    1000,
    SLOT_BYTES // 4 + 7,
    3 * SLOT_BYTES // 4,
    LARGEST_IN_RING // 4,
    LARGEST_IN_RING // 4 + 1,
)


@pytest.fixture(params=list(STAGES.values()), ids=list(STAGES))
def stages(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Ranks]]:
    num_stages, size = request.param
    if native_ops() is None:
        pytest.skip("no native kernels here")
    descriptor = open_shared(num_stages, size)
    num_ranks = num_stages * size
    with ThreadPoolExecutor(num_ranks) as pool:
        made = [
            pool.submit(torch_group.connect, rank, num_ranks, size, str(tmp_path), CPU, descriptor)
            for rank in range(num_ranks)
        ]
        ranks = [one.result() for one in made]
    assert all(isinstance(one.point_to_point, SharedPointToPoint) for one in ranks)
    yield ranks
    if descriptor is not None:
        os.close(descriptor)


def drawn(number: int, stage: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number * 10 + stage)
    return torch.randn(SIZES[number % len(SIZES)], generator=draw)


def test_each_stage_gets_what_the_stage_before_sends_in_order(stages: list[Ranks]) -> None:
    num = 4 * len(SIZES)  # more than the ring holds

    def run(ranks: Ranks) -> bool:
        is_right = True
        for number in range(num):
            if not ranks.is_first_stage:
                expected = drawn(number, ranks.stage - 1)
                is_right &= torch.equal(ranks.take_over(torch.empty_like(expected)), expected)
            if not ranks.is_last_stage:
                ranks.pass_on(drawn(number, ranks.stage))
        return is_right

    with ThreadPoolExecutor(len(stages)) as pool:
        assert all(pool.map(run, stages))


def test_a_stage_may_be_ahead_of_the_next_and_is_told_of_its_end(stages: list[Ranks]) -> None:
    first, second = (next(one for one in stages if one.stage == number) for number in (0, 1))
    for number in range(RING_SLOTS):  # the next stage receives nothing yet
        first.pass_on(torch.full((5,), float(number)))
    assert float(second.take_over(torch.empty(5))[0]) == 0.0

    def send_two() -> None:
        for _ in range(2):
            first.pass_on(torch.zeros(3))

    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(send_two)
        second.abort()
        with pytest.raises(CollectiveError, match="gone"):
            sent.result()
    with pytest.raises(CollectiveError, match="gone"):
        second.take_over(torch.empty(5))


def test_who_waits_for_a_rank_that_is_gone_is_told(group: Group) -> None:
    waiting = group[0]
    if not isinstance(waiting, SharedGroup):
        return  # gloo: tests/contract/test_executors.py, as connections have to break
    timer = threading.Timer(0.2, waiting.abort)
    timer.start()
    with pytest.raises(CollectiveError, match="gone"):
        waiting.all_reduce(torch.zeros(3))


def test_who_waits_takes_no_time_of_a_processor(group: Group) -> None:
    if not isinstance(group[0], SharedGroup):
        return
    late = threading.Timer(1.0, lambda: group[0].all_reduce(torch.zeros(3)))
    with ThreadPoolExecutor(len(group)) as pool:
        futures = [pool.submit(rank.all_reduce, torch.zeros(3)) for rank in group[1:]]
        before = time.process_time()
        late.start()
        for future in futures:
            future.result()
        assert time.process_time() - before < 0.5  # of a second that each of them waited
