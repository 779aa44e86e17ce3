"""Measured times of sums over the ranks of one machine, by which a sum's way is chosen.

`tools/rank_sums_table.py` writes ``measured.json`` from what the GPU suite recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("measured.json")
NCCL, ONE_PASS, TWO_PASSES = "nccl", "one_pass", "two_passes"
# Unless measured otherwise, larger tensors are summed in two passes: each rank then reads fewer
# bytes, but the ranks meet twice. vLLM's sum for GPUs has this limit for four ranks.
ONE_PASS_BYTES = 2**19


class MeasuredSum(NamedTuple):
    """A sum, and the times that several ways took for it.

    Attributes:
        gpu: the GPUs' name in torch.
        num_ranks: number of ranks.
        num_bytes: size of the summed tensor.
        us: way (``nccl``, ``one_pass``, ``two_passes``) -> microseconds.
    """

    gpu: str
    num_ranks: int
    num_bytes: int
    us: dict[str, float]


@cache
def read_table(path: Path = TABLE) -> tuple[MeasuredSum, ...]:
    """Read all measured sums; return an empty tuple if the file is missing."""
    if not path.exists():
        return ()
    return tuple(MeasuredSum(**row) for row in json.loads(path.read_text(encoding="utf-8")))


def measured_sums(device: torch.device, num_ranks: int) -> tuple[MeasuredSum, ...]:
    """Return the sums that so many ranks computed on this kind of device."""
    if device.type != "cuda" or not read_table():
        return ()
    gpu = torch.cuda.get_device_name(device)
    return tuple(row for row in read_table() if (row.gpu, row.num_ranks) == (gpu, num_ranks))


def way_of(num_bytes: int, rows: Sequence[MeasuredSum], with_nccl: bool) -> str:
    """Return the fastest way at the nearest measured size.

    Args:
        num_bytes: size of the tensor to sum.
        rows: measured sums; if there are none, the size alone decides between one and two passes.
        with_nccl: whether NCCL may be chosen.
    """
    if not rows:
        return ONE_PASS if num_bytes <= ONE_PASS_BYTES else TWO_PASSES
    row = min(rows, key=lambda row: abs(math.log2(row.num_bytes / num_bytes)))
    times = {way: us for way, us in row.us.items() if with_nccl or way != NCCL}
    return min(times, key=times.__getitem__)
