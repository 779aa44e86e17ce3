"""How a sum's way is chosen, and how the GPU suite's figures become the table of measured sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.errors import ConfigError
from baton_kernels.triton.ranks import measured
from baton_kernels.triton.ranks.measured import MeasuredSum, read_table, way_of
from models.parallel import mapped_group
from models.parallel.group import SINGLE_RANK
from models.parallel.mapped_group import map_memory
from tools import rank_sums_table

CPU = torch.device("cpu")
ROWS = (
    MeasuredSum("H", 2, 2**13, {"nccl": 20.0, "one_pass": 8.0, "two_passes": 12.0}),
    MeasuredSum("H", 2, 2**20, {"nccl": 30.0, "one_pass": 40.0, "two_passes": 25.0}),
    MeasuredSum("H", 2, 2**25, {"nccl": 90.0, "one_pass": 400.0, "two_passes": 120.0}),
)


class TwoRanks:
    """Stands in for a group of two ranks, of which nothing is asked but the size."""

    rank, size = 0, 2


@pytest.mark.parametrize(
    ("num_bytes", "rows", "with_nccl", "way"),
    [
        (2**10, (), True, "one_pass"),
        (2**19, (), False, "one_pass"),
        (2**19 + 2, (), False, "two_passes"),
        (2**10, ROWS, True, "one_pass"),
        (2**19, ROWS, True, "two_passes"),
        (2**24, ROWS, True, "nccl"),
        (2**24, ROWS, False, "two_passes"),
    ],
)
def test_a_sum_takes_the_way_that_was_fastest_at_the_nearest_size(
    num_bytes: int, rows: tuple[MeasuredSum, ...], with_nccl: bool, way: str
) -> None:
    assert way_of(num_bytes, rows, with_nccl) == way


def test_without_measured_sums_only_nccl_sums_on_gpus() -> None:
    two: Any = TwoRanks()
    assert read_table() == (), "a GPU has measured sums: say so in ADR 0132"
    assert map_memory(two, "auto", torch.device("cuda"), store=None) is None
    assert map_memory(two, "nccl", torch.device("cuda"), store=None) is None
    assert map_memory(SINGLE_RANK, "own", torch.device("cuda"), store=None) is None


def test_own_sums_on_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    two: Any = TwoRanks()
    with pytest.raises(ConfigError, match="rank_sums: own is for GPUs, but the ranks are on cpu"):
        map_memory(two, "own", CPU, store=None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(mapped_group, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rank_sums: own needs the package triton; use nccl"):
        map_memory(two, "own", CPU, store=None)


def test_what_the_gpu_suite_measured_becomes_rows_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MeasuredSum("Z", 2, 2**13, {"nccl": 1.0})
    before = MeasuredSum("H", 2, 2**13, {"nccl": 1.0})
    table, results = tmp_path / "measured.json", tmp_path / "suite.json"
    table.write_text(json.dumps([other._asdict(), before._asdict()]), encoding="utf-8")
    part = {
        "ok": True,
        "sum: 2 ranks, 8192 bytes": "one_pass 8.0, two_passes 12.0, nccl 20.0",
        "seconds": 3.0,
    }
    document = {"environment": {"gpu": "H"}, "parts": {"sum times": part}}
    results.write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(rank_sums_table, "TABLE", table)
    monkeypatch.setattr(rank_sums_table, "read_table", lambda: measured.read_table(table))
    assert rank_sums_table.main(results) == 0
    read_table.cache_clear()
    assert read_table(table) == (ROWS[0], other)
    read_table.cache_clear()
    results.write_text(json.dumps({**document, "parts": {}}), encoding="utf-8")
    assert rank_sums_table.main(results) == 1
