"""Draws adapters' matrices for one layer, for tests of ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton_kernels import LowRank, LowRankPart, PackedWeight, WeightFormat


def draw_low_rank(
    num_inputs: int,
    columns: Sequence[slice],
    ranks: Sequence[int],
    dtype: torch.dtype,
    width: int,
    *,
    has_gains: bool = False,
) -> LowRank:
    """Draw an adapter whose products are about as large as 1.

    Args:
        num_inputs: inputs of the layer.
        columns: the columns of the layer's output that each part changes.
        ranks: the rank of each part.
        dtype: type of the numbers.
        width: outputs of a panel.
        has_gains: whether parts have gains and shifts, as with DoRA.
    """
    format_ = WeightFormat.of(dtype)
    assert format_ is not None
    parts: list[LowRankPart] = []
    for one, rank in zip(columns, ranks, strict=True):
        num_columns = one.stop - one.start
        up = torch.randn(num_columns, rank) / rank**0.5
        gains, shifts = 0.5 + torch.rand(num_columns), torch.randn(num_columns)
        first_rank = sum(part.b.in_features for part in parts)
        packed = PackedWeight.pack(up, None, format_, width)
        more = (gains, shifts) if has_gains else (None, None)
        parts.append(LowRankPart(first_rank, one.start, packed, *more))
    down = torch.randn(sum(ranks), num_inputs) / num_inputs**0.5
    return LowRank(PackedWeight.pack(down, None, format_, width), tuple(parts))
