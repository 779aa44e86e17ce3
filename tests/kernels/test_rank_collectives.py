"""Sums in mapped memory: equal bits on all ranks, whoever is ahead, and no endless wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.rank_process import FAULTS

NUM_LARGE = 2000
GONE = ["another rank is gone, or did not respond in time", "left"]


def run_ranks(folder: Path, size: int, tasks: dict[str, int]) -> dict[str, list[object]]:
    """Run tasks on ranks in processes of their own; return each task's results by rank."""
    words = [f"{task}:{num}" for task, num in tasks.items()]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.rank_process"]
            + [str(word) for word in (rank, size, folder, *words)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    by_rank = [json.loads(text) for text in printed]
    return dict(zip(tasks, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.timeout(180)
def test_all_ranks_get_the_sum_in_the_order_of_the_ranks_and_none_waits_for_ever(
    tmp_path: Path,
) -> None:
    tasks = {"sums": 20, "no second meeting": 16, "wrap": 6, "abort": 0, "give up": 0}
    found = run_ranks(tmp_path, 2, tasks)
    broken = found.pop("no second meeting")
    assert found == {"sums": [0, 0], "wrap": [0, 0], "abort": GONE, "give up": GONE}
    assert sum(map(int, map(str, broken))) > 0


@pytest.mark.large
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_thousands_of_drawn_sums_are_right(size: int, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, size, {"sums": NUM_LARGE}) == {"sums": [0] * size}


@pytest.mark.large
@pytest.mark.timeout(300)
def test_every_part_of_the_protocol_is_needed(tmp_path: Path) -> None:
    for fault, wrong in run_ranks(tmp_path, 2, dict.fromkeys(FAULTS, 300)).items():
        assert sum(map(int, map(str, wrong))) > 0, fault
