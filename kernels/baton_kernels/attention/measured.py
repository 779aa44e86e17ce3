"""Times of whole attention steps on GPUs, which decide whether a library computes prompts.

`tools/attention_table.py` writes ``measured.json`` from what the GPU suite recorded. A GPU without
rows there gets the choice that needs no measurement.
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
    """One step that several backends computed on one GPU.

    Attributes:
        gpu: the GPU's name, as torch tells it.
        head_dim: numbers of a head.
        group: query heads for each KV head.
        new_tokens: tokens that a request computes.
        seq_len: tokens of the request, cached ones included.
        us: backend's name -> microseconds, gathering of blocks included.
    """

    gpu: str
    head_dim: int
    group: int
    new_tokens: int
    seq_len: int
    us: dict[str, float]


@cache
def read_table(path: Path = TABLE) -> tuple[MeasuredStep, ...]:
    """Read all measured steps; none if the file is missing."""
    if not path.exists():
        return ()
    return tuple(MeasuredStep(**row) for row in json.loads(path.read_text(encoding="utf-8")))


def steps_of_gpu(gpu: str, backend: str) -> tuple[MeasuredStep, ...]:
    """Return the steps with prompts that both ``backend`` and Triton computed on such a GPU."""
    names = {"triton", backend}
    return tuple(
        step
        for step in read_table()
        if step.gpu == gpu and names <= step.us.keys() and step.new_tokens > 1
    )


def measured_steps(device: torch.device, backend: str) -> tuple[MeasuredStep, ...]:
    """Return :func:`steps_of_gpu` for a device; none on a CPU."""
    if device.type != "cuda":
        return ()
    return steps_of_gpu(torch.cuda.get_device_name(device), backend)


def nearest(
    steps: Sequence[MeasuredStep], head_dim: int, group: int, new_tokens: int, seq_len: int
) -> MeasuredStep:
    """Return the measured step that is most like the given one, by the ratios of all sizes."""

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
    """Return the library that saves most of Triton's time over all measured prompts.

    Returns:
        ``(library, its time / Triton's)``, each step by the faster of the two; None: none saves
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
