"""Compare both divisions of experts over ranks: whole experts per rank, or a part of every expert.

Both divisions need the same sum over ranks, so only the experts' op is timed: one rank after the
other computes its share in this process, on one thread. A step takes as long as its slowest rank.
Times are processor times, because other processes on the machine make wall times longer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.runner.run import Document, Run

TOP_K, NUM_EXPERTS, HIDDEN = 4, 32, 2048
INNER_SIZES, NUM_RANKS = (768, 384), (2, 4)
TOKENS = {"1 decode": 1, "8 decodes": 8, "64 decodes": 64, "prompt of 512": 512}
ROUTINGS = ("even", "skewed")
FORMATS = ("bf16", "int4")
NUM_DRAWS, NUM_TIMES = 6, 3


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's packed weights: gates and ups, downs, and the experts that the rank has."""

    gate_up: Any
    down: Any
    share: Any


def random_share(inner_size: int, num_experts: int, format_name: str, share: Any) -> Share:
    """Pack random weights of ``num_experts`` experts with ``inner_size``."""
    import torch

    from baton_kernels import PackedWeight, WeightFormat
    from baton_kernels.dispatch import native_ops

    ops = native_ops()
    assert ops is not None, "this machine has no native kernels"
    format_ = WeightFormat(format_name)

    def pack(rows: int, columns: int) -> Any:
        width = ops.panel_width
        weight = (torch.randn(rows, columns) / columns**0.5).bfloat16()
        filled = torch.nn.functional.pad(weight, (0, 0, 0, -rows % width))
        packed = PackedWeight.empty(len(filled) * num_experts, columns, format_, width, torch.empty)
        for expert in range(num_experts):
            ops.pack_rows(packed, expert * len(filled), filled)
        return packed

    return Share(pack(2 * inner_size, HIDDEN), pack(HIDDEN, inner_size), share)


def draw_experts(num_tokens: int, routing: str, seed: int) -> tuple[Any, Any]:
    """Draw each token's experts; return ids and weights, ``[num_tokens, TOP_K]``.

    With skewed routing, the n-th most popular expert is chosen with odds of 1/n.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    odds = torch.ones(NUM_EXPERTS)
    if routing == "skewed":
        odds = 1 / (1 + torch.randperm(NUM_EXPERTS, generator=generator).float())
    ids = torch.multinomial(odds.expand(num_tokens, -1), TOP_K, generator=generator)
    return ids.contiguous(), torch.full((num_tokens, TOP_K), 1 / TOP_K)


def seconds(part: Share, ids: Any, weights: Any) -> float:
    """Return the least processor seconds in which a rank computes its share."""
    import torch

    from baton_kernels.dispatch import native_ops

    ops = native_ops()
    assert ops is not None, "this machine has no native kernels"
    x = torch.randn(len(ids), HIDDEN)
    samples = []
    for _ in range(NUM_TIMES):
        started = time.process_time()
        ops.packed_experts(x, ids, weights, part.gate_up, part.down, share=part.share)
        samples.append(time.process_time() - started)
    return min(samples)


def measure_shape(inner_size: int, num_ranks: int, format_name: str) -> dict[str, dict[str, Any]]:
    """Return, by kind of step and routing, the milliseconds of both divisions and their ratio."""
    from baton_kernels import ALL_EXPERTS, ExpertShare
    from models.parallel.shards import Rank

    spans = [Rank(rank, num_ranks).wide_span(inner_size) for rank in range(num_ranks)]
    most_inner = max(end - first for first, end in spans)
    split = random_share(most_inner, NUM_EXPERTS, format_name, ALL_EXPERTS)
    ranks = [ExpertShare(rank, num_ranks) for rank in range(num_ranks)]
    number = NUM_EXPERTS // num_ranks
    whole = random_share(inner_size, number, format_name, ranks[0])
    parts = [Share(whole.gate_up, whole.down, one) for one in ranks]
    warm_up = draw_experts(max(TOKENS.values()), "even", NUM_DRAWS)
    for part in (split, *parts):  # touches the kernels' memory
        seconds(part, *warm_up)
    found: dict[str, dict[str, Any]] = {}
    for step, num_tokens in TOKENS.items():
        for routing in ROUTINGS:
            of_split, of_whole, most = list[float](), list[float](), list[float]()
            for seed in range(NUM_DRAWS):
                drawn = draw_experts(num_tokens, routing, seed)
                of_split.append(seconds(split, *drawn))
                of_whole.append(max(seconds(part, *drawn) for part in parts))
                counts = [(drawn[0] % num_ranks == rank).sum().item() for rank in range(num_ranks)]
                most.append(max(counts) * num_ranks / sum(counts))
            found[f"{step}, {routing}"] = {
                "split_ms": statistics.mean(of_split) * 1e3,
                "whole_ms": statistics.mean(of_whole) * 1e3,
                "ratio": statistics.mean(of_whole) / statistics.mean(of_split),
                "busiest_over_mean": statistics.mean(most),
            }
    return found


def run(run: Run) -> Document:
    """Measure all shapes, numbers of ranks and formats; a ratio below 1 favours whole experts."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for format_name in FORMATS:
        for inner_size in INNER_SIZES:
            for num_ranks in NUM_RANKS:
                name = f"{format_name}, {inner_size}, {num_ranks} ranks"
                found[name] = measure_shape(inner_size, num_ranks, format_name)
                run.show(name, found[name])
    sizes = {"hidden": HIDDEN, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    return {"sizes": sizes, "shapes": found}
