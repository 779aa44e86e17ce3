"""Make the matrices by which an adapter changes one layer, packed for CPU kernels.

A joined layer has a part for each of its projections that the adapter adapts; see ``ops.LowRank``.

With DoRA (Liu et al., arXiv:2402.09353) each row of the adapted weight has a norm of its own. That
scales the layer's own product, too; the rows' factors are computed once, from the base weight.
Refuses to know: files, which rows of a step belong to which request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


# What one module of an adapter adds to a layer: its factors, and which rows they are.
Piece = tuple[Factors, Sequence[TargetPart]]


def make_low_rank(
    layer: nn.Module,
    files: AdapterFiles,
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    width: int,
) -> ops.LowRank:
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
    num_outputs = _num_outputs(layer)
    down = torch.cat([one.a for one, _ in pieces])  # [sum of ranks, in]
    made: list[ops.LowRankPart] = []
    first_rank = 0
    for factors, parts in pieces:
        for part in parts:
            up = part.of(factors.b)
            gains: Tensor | None = None
            shifts: Tensor | None = None
            if factors.magnitude is not None:
                gains = gains_of(files, factors, _row_norms(layer, part.rows, up, factors.a), part)
                up = up * gains.unsqueeze(1)
                bias = _bias(layer)
                shifts = None if bias is None else bias[part.rows] * (1 - gains)
            refuse_large(files, factors, dtype, factors.a, up)
            first_column = part.rows.indices(num_outputs)[0]
            packed = pack_matrix(up, dtype, width)
            made.append(ops.LowRankPart(first_rank, first_column, packed, gains, shifts))
        first_rank += len(factors.a)
    return ops.LowRank(pack_matrix(down, dtype, width), tuple(made))


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
