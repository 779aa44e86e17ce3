"""Linear layers beyond torch's own: several projections in one product, packed weights.

One large product reads its input once and is launched once. Refuses to know: what the parts mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

import baton_kernels as ops


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
        """Return each part's name and its rows of weight and bias."""
        start = 0
        for name, size in self._parts.items():
            yield name, slice(start, start + size)
            start += size


class GatedLinear(JoinedLinear):
    """``silu(first part) * second part`` of one product, the parts of equal size."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features / 2]``."""
        return ops.silu_mul(super().forward(x))


class PackedLinear(nn.Module):
    """A linear layer on a CPU whose weight is kept in panels; made of a loaded one.

    Args:
        weight: its parameters, which are read only.
        gated: whether it was a ``GatedLinear``.

    Attributes:
        packed: the weight.
    """

    def __init__(self, weight: ops.PackedWeight, *, gated: bool = False) -> None:
        super().__init__()
        self._compute = ops.packed_gated_linear if gated else ops.packed_linear
        self.packed = weight
        # The same memory under the names by which memory is counted.
        self.weight = nn.Parameter(weight.panels, requires_grad=False)
        self.bias = None if weight.bias is None else nn.Parameter(weight.bias, requires_grad=False)
        scales = (weight.scales, weight.group_scales)
        self.scales = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False) for tensor in scales if tensor is not None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the layer that was packed computes."""
        return self._compute(x, self.packed)


__all__ = ["GatedLinear", "JoinedLinear", "PackedLinear"]
