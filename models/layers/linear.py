"""Linear layers whose weights a checkpoint keeps apart and one product computes together.

One large product reads its input once and is launched once. Refuses to know: what the parts mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn


class JoinedLinear(nn.Linear):
    """Several projections of one input, stacked along the output.

    Args:
        in_features: of all of them.
        parts: name of each in the checkpoint -> its rows, in the order of the output.
        bias: whether each has one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self._parts = dict(parts)

    def part_rows(self) -> Iterator[tuple[str, slice]]:
        """Each part's name and its rows of weight and bias."""
        start = 0
        for name, size in self._parts.items():
            yield name, slice(start, start + size)
            start += size


__all__ = ["JoinedLinear"]
