"""LowRank: the product that an adapter adds to one layer's output, packed for CPU kernels.

    out += (x @ A^T) @ B^T        A: [rank, in], B: [out, rank], with the scale in B

Layers that are joined here have one A and one B, whose ranks lie side by side:

    A = [ A of q ]    B = [ B of q |   0    |   0    ]
        [ A of k ]        [   0    | B of k |   0    ]
        [ A of v ]        [   0    |   0    | B of v ]

With DoRA (Liu et al., arXiv:2402.09353) each row of the adapted weight has a norm of its own. That
scales the layer's own product, too; the rows' factors are computed once, from the base weight.
Refuses to know: files, which rows of a step belong to which request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from baton.adapters.modules import AdapterFiles
from baton_kernels import PackedWeight, WeightFormat
from models.adapters.factors import Factors
from models.adapters.targets import TargetPart
from models.layers.linear import GatedLinear, PackedLinear

_ROWS = 1024  # rows of a base weight that are unpacked at a time


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """An adapter's part of one layer.

    Attributes:
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``.
        gains: ``[out_features]``, factors of the layer's own product; None: all are 1.
        shifts: ``[out_features]``, the part of the bias that the factors take away.
    """

    a: PackedWeight
    b: PackedWeight
    gains: Tensor | None = None
    shifts: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the size in memory."""
        tensors = (*self.a.tensors, *self.b.tensors, self.gains, self.shifts)
        return sum(one.numel() * one.itemsize for one in tensors if one is not None)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Adapt a layer's results in place.

        Args:
            out: ``[n, out_features]``, contiguous, the layer's own results.
            x: ``[n, in_features]``, the layer's input.
        """
        delta = ops.packed_linear(ops.packed_linear(x, self.a), self.b)
        if self.gains is not None and self.shifts is not None:
            out.mul_(self.gains).add_(self.shifts)
        ops.add_rows(out, delta if delta.dtype == out.dtype else delta.to(out.dtype))


# What one module of an adapter adds to a layer: its factors, and which rows they are.
Piece = tuple[Factors, Sequence[TargetPart]]


def make_low_rank(
    layer: nn.Module,
    files: AdapterFiles,
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    width: int,
) -> LowRank:
    """Pack an adapter's part of one layer.

    Args:
        layer: the base model's layer, whose weight DoRA needs.
        files: the adapter's files, for error messages.
        pieces: what the adapter's modules add to the layer.
        dtype: type that the model computes in.
        width: outputs of a panel.

    Raises:
        AdapterError: a number is too large for ``dtype``, or a row of the adapted weight is 0.
    """
    num_outputs, ranks = _num_outputs(layer), [len(one.a) for one, _ in pieces]
    down = torch.cat([one.a for one, _ in pieces])  # [sum of ranks, in]
    up = torch.zeros(num_outputs, sum(ranks))
    gains: Tensor | None = None
    first = 0
    for (factors, parts), rank in zip(pieces, ranks, strict=True):
        for part in parts:
            rows = part.of(factors.b)
            if factors.magnitude is not None:
                gains = torch.ones(num_outputs) if gains is None else gains
                norms = _row_norms(layer, part.rows, rows, factors.a)
                gains[part.rows] = gains_of(files, factors, norms, part)
                rows = rows * gains[part.rows].unsqueeze(1)
            up[part.rows, first : first + rank] = rows
        first += rank
    refuse_large(files, pieces[0][0], dtype, down, up)
    a, b = (pack_matrix(matrix, dtype, width) for matrix in (down, up))
    if gains is None:
        return LowRank(a, b)
    bias = _bias(layer)
    shifts = torch.zeros(num_outputs) if bias is None else bias * (1 - gains)
    return LowRank(a, b, gains.to(dtype), shifts.to(dtype))


def gains_of(files: AdapterFiles, factors: Factors, norms: Tensor, part: TargetPart) -> Tensor:
    """Return DoRA's factor of each row, ``[n]``, given the norms of the adapted weight's rows.

    Raises AdapterError if a row is 0.
    """
    assert factors.magnitude is not None
    if not bool((norms > 0).all()):
        raise files.wrong(factors.module.b, "a row of the adapted weight is 0")
    return part.of(factors.magnitude) / norms


def refuse_large(
    files: AdapterFiles, factors: Factors, dtype: torch.dtype, a: Tensor, b: Tensor
) -> None:
    """Raise AdapterError for a number that is too large for ``dtype``."""
    for name, matrix in (("lora_A", a), ("lora_B", b)):
        if not bool(matrix.to(dtype).isfinite().all()):
            problem = f"{name} has a number that is too large for {dtype}"
            raise files.wrong(factors.module.a, problem.replace("torch.", ""))


def plain_product(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's product without its activation: ``[n, in]`` -> ``[n, out_features]``."""
    if activation_of(layer) is None:
        product: Tensor = layer(x)
        return product
    if isinstance(layer, PackedLinear):
        return ops.packed_linear(x, layer.packed)
    assert isinstance(layer, nn.Linear)
    return functional.linear(x, layer.weight, layer.bias)


def activation_of(layer: nn.Module) -> str | None:
    """Return the activation behind a layer's product; None: there is none."""
    return layer.activation if isinstance(layer, GatedLinear | PackedLinear) else None


def _num_outputs(layer: nn.Module) -> int:
    if isinstance(layer, PackedLinear):
        return layer.packed.out_features
    assert isinstance(layer, nn.Linear)
    return layer.out_features


def _bias(layer: nn.Module) -> Tensor | None:
    """Return a layer's bias, ``[out_features]`` float32."""
    bias = getattr(layer, "bias", None)
    return None if bias is None else bias.detach().float()


def _row_norms(layer: nn.Module, rows: slice, up: Tensor, down: Tensor) -> Tensor:
    """Return the norm of each row of an adapted weight, ``[n]``.

    Args:
        rows: rows of the layer's weight, n of them.
        up: ``[n, rank]``, with the scale.
        down: ``[rank, in_features]``.
    """
    norms = [
        (weight + up[first : first + len(weight)] @ down).norm(dim=1)
        for first, weight in _weight_rows(layer, rows)
    ]
    return torch.cat(norms)


def _weight_rows(layer: nn.Module, rows: slice) -> Iterator[tuple[int, Tensor]]:
    """Yield a layer's rows in float32, some at a time, with the number of the first."""
    first, end, _ = rows.indices(_num_outputs(layer))
    for start in range(first, end, _ROWS):
        stop = min(start + _ROWS, end)
        if isinstance(layer, PackedLinear):
            yield start - first, layer.packed.read_rows(torch.arange(start, stop)).float()
        else:
            weight = layer.weight
            assert isinstance(weight, Tensor)
            yield start - first, weight[start:stop].detach().float()


def pack_matrix(matrix: Tensor, dtype: torch.dtype, width: int) -> PackedWeight:
    """Pack a matrix, ``[outputs, inputs]``, in a model's dtype."""
    format_ = WeightFormat.of(dtype)
    assert format_ is not None, dtype
    num_rows, num_columns = matrix.shape
    packed = PackedWeight.empty(num_rows, num_columns, format_, width)
    ops.pack_rows(packed, 0, matrix)
    return packed
