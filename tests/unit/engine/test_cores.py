"""Unit tests of the cores that a rank gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig
from engine.worker.host.cores import cores_by_numa, cores_of_rank, numa_nodes, on_cores

TWO = [frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})]


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, ["01234567"]),
        (2, ["0123", "4567"]),
        (3, ["01", "23", "4567"]),
        (4, ["01", "23", "45", "67"]),
    ],
)
def test_each_rank_has_a_node_or_a_part_of_one(num_ranks: int, expected: list[str]) -> None:
    found = [cores_by_numa(TWO, rank, num_ranks) for rank in range(num_ranks)]
    assert found == [frozenset(map(int, cores)) for cores in expected]


def test_more_ranks_than_cores_share_them() -> None:
    assert {cores_by_numa([frozenset({0, 1})], rank, 3) for rank in range(3)} == {frozenset({0, 1})}
    assert cores_by_numa([], 0, 2) == frozenset()


def test_nodes_are_those_that_the_process_may_run_on(tmp_path: Path) -> None:
    own = min(os.sched_getaffinity(0))
    for number, cores in ((0, f"{own}"), (1, "60000-60003"), (2, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == [frozenset({own})]
    assert numa_nodes(tmp_path / "none") == []


def test_what_is_no_list_of_cores_is_refused() -> None:
    assert EngineConfig(cpu_list="numa").cpu_list == "numa"
    with pytest.raises(ConfigError, match="cpu_list"):
        EngineConfig(cpu_list="numb")


def test_ranks_divide_the_cores_of_their_process_where_there_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 9})
    two = EngineConfig(tensor_parallel_size=2)
    assert [cores_of_rank(two, rank) for rank in range(2)] == [{3, 4}, {5, 9}]
    assert cores_of_rank(EngineConfig(tensor_parallel_size=3, pipeline_parallel_size=2), 0) == set()
    assert cores_of_rank(EngineConfig(tensor_parallel_size=2, cpu_list="0-1"), 0) == set()


def test_a_thread_is_elsewhere_only_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    with on_cores(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with on_cores(frozenset()):
        assert os.sched_getaffinity(0) == before
