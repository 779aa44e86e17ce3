"""Measured times of attention on GPUs, by which a library is chosen for prompts.

`tools/attention_table.py` writes ``measured.json`` from what the GPU suite recorded.
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


class MeasuredStep(NamedTuple):
    """One attention step, and the times that several backends took for it on one GPU.

    Attributes:
        gpu: the GPU's name in torch.
        head_dim: size of a head.
        group: number of query heads per KV head.
        new_tokens: number of tokens that a request computes.
        seq_len: number of all tokens of the request, including cached tokens.
        us: name of a backend -> microseconds, including the gathering of blocks.
    """

    gpu: str
    head_dim: int
    group: int
    new_tokens: int
    seq_len: int
    us: dict[str, float]


@cache
def read_table(path: Path = TABLE) -> tuple[MeasuredStep, ...]:
    """Read all measured steps; return an empty tuple if the file is missing."""
    if not path.exists():
        return ()
    return tuple(MeasuredStep(**row) for row in json.loads(path.read_text(encoding="utf-8")))


def steps_of_gpu(gpu: str, backend: str) -> tuple[MeasuredStep, ...]:
    """Return the steps with prompts that ``backend`` and Triton both computed on a GPU model."""
    names = {"triton", backend}
    return tuple(
        step
        for step in read_table()
        if step.gpu == gpu and names <= step.us.keys() and step.new_tokens > 1
    )


def measured_steps(device: torch.device, backend: str) -> tuple[MeasuredStep, ...]:
    """Return the steps that ``backend`` and Triton both computed on this kind of device."""
    if device.type != "cuda":
        return ()
    return steps_of_gpu(torch.cuda.get_device_name(device), backend)


def nearest(
    steps: Sequence[MeasuredStep], head_dim: int, group: int, new_tokens: int, seq_len: int
) -> MeasuredStep:
    """Return the measured step that is most similar to a step with the given sizes.

    Similarity is judged by the ratios of the sizes.
    """

    def distance(step: MeasuredStep) -> float:
        pairs = (
            (step.head_dim, head_dim),
            (step.group, group),
            (step.new_tokens, new_tokens),
            (step.seq_len, seq_len),
        )
        return sum(abs(math.log2(one / other)) for one, other in pairs)

    return min(steps, key=distance)


def fastest_library(gpu: str, libraries: Sequence[str]) -> tuple[str, float] | None:
    """Return the library that saves the most time, compared with Triton alone.

    Each measured step with prompts is assumed to be computed by the faster of library and Triton.

    Returns:
        The library, and the mean ratio of the times with and without it; None: no library saves
        time, or nothing was measured on this GPU.
    """
    best: tuple[str, float] | None = None
    for name in libraries:
        steps = steps_of_gpu(gpu, name)
        if not steps:
            continue
        ratios = [min(step.us[name] / step.us["triton"], 1.0) for step in steps]
        ratio = math.prod(ratios) ** (1 / len(ratios))
        if ratio < (best[1] if best else 1.0):
            best = name, ratio
    return best
