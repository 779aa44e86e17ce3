"""Makes the matrices by which a LoRA adapter changes one layer, packed for CPU kernels.

For a fused layer, such as ``qkv_proj``, the matrices have one part per adapted projection.

With DoRA (Liu et al., arXiv:2402.09353) each row of the adapted weight (base weight + B A) is
scaled to a learned norm. The scaling also changes the base layer's product. The factor of each row
is computed once, when the adapter is packed.

Ranks (processes) divide A and B like the base weight: B's rows like its rows, A's columns like its
columns. If ranks divide columns, the squared norm of each row is summed over the ranks.

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

_ROWS = 1024  # rows of a base weight that are unpacked at a time to compute norms


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One module of an adapter: the matrices that change this rank's part of a layer.

    Attributes:
        factors: the module's matrices, in the checkpoint's order.
        parts: the parts of the layer that the module changes; all have the same columns.
        norms: norm of each row of the adapted weight, part after part; None: no DoRA.
    """

    factors: Factors
    parts: Sequence[TargetPart]
    norms: Tensor | None = None

    @property
    def down(self) -> Tensor:
        """Return the columns of A for the inputs that this rank reads, ``[rank, inputs]``."""
        columns = self.parts[0].columns
        return self.factors.a if columns is None else self.factors.a[:, columns]

    @property
    def is_summed(self) -> bool:
        """Return whether ranks divide the layer's columns, and so sum its results."""
        return self.parts[0].columns is not None

    def rows(self) -> Iterator[tuple[TargetPart, Tensor, Tensor | None]]:
        """Yield each part, the part's rows of B, ``[n, rank]``, and the norms, ``[n]`` or None."""
        first = 0
        for part in self.parts:
            up = part.of(self.factors.b)
            norms = None if self.norms is None else self.norms[first : first + len(up)]
            yield part, up, norms
            first += len(up)


def make_low_rank(
    layer: nn.Module,
    files: AdapterFiles,
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    width: int,
) -> ops.LowRank:
    """Pack one adapter's matrices for one layer.

    Args:
        layer: the base model's layer, whose bias DoRA needs.
        files: the adapter's files, for error messages.
        pieces: what each of the adapter's modules adds to the layer; with DoRA, with norms.
        dtype: type that the model computes in.
        width: number of outputs in a panel of packed weights.

    Raises:
        AdapterError: a number is too large for ``dtype``, or a row of the adapted weight is 0.
    """
    num_outputs = _num_outputs(layer)
    downs = [piece.down for piece in pieces]
    down = downs[0] if len(downs) == 1 else torch.cat(downs)  # [sum of ranks, in]
    made: list[ops.LowRankPart] = []
    first_rank = 0
    for piece in pieces:
        factors = piece.factors
        for part, up, norms in piece.rows():
            gains: Tensor | None = None
            shifts: Tensor | None = None
            if norms is not None:
                gains = gains_of(files, factors, norms, part)
                up = up * gains.unsqueeze(1)
                bias = _bias(layer)
                shifts = None if bias is None else bias[part.rows] * (1 - gains)
            refuse_large(files, factors, dtype, piece.down, up)
            first_column = part.rows.indices(num_outputs)[0]
            packed = pack_matrix(up, dtype, width)
            made.append(ops.LowRankPart(first_rank, first_column, packed, gains, shifts))
        first_rank += len(factors.a)
    return ops.LowRank(pack_matrix(down, dtype, width), tuple(made))


def gains_of(files: AdapterFiles, factors: Factors, norms: Tensor, part: TargetPart) -> Tensor:
    """Return DoRA's factor of each row, ``[n]``: the learned norm divided by the row's norm.

    Raises AdapterError if all numbers of a row are 0.
    """
    assert factors.magnitude is not None
    if not bool((norms > 0).all()):
        raise files.wrong(factors.module.b, "a row of the adapted weight is 0")
    return part.of(factors.magnitude) / norms


def refuse_large(
    files: AdapterFiles, factors: Factors, dtype: torch.dtype, a: Tensor, b: Tensor
) -> None:
    """Raise AdapterError if a number of A or B is too large for ``dtype``."""
    for name, matrix in (("lora_A", a), ("lora_B", b)):
        # the check for infinite numbers was made when the adapter was read
        is_as_read = matrix.dtype != torch.float32
        if is_as_read and torch.finfo(matrix.dtype).max <= torch.finfo(dtype).max:
            continue
        extremes = torch.stack(matrix.aminmax())  # NaN if any number is NaN
        if not bool(extremes.to(dtype).isfinite().all()):
            problem = f"{name} has a number that is too large for {dtype}"
            raise files.wrong(factors.module.a, problem.replace("torch.", ""))


def plain_product(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's result before its activation, ``[n, out_features]``, for ``[n, in]``."""
    if activation_of(layer) is None:
        product: Tensor = layer(x)
        return product
    if isinstance(layer, PackedLinear):
        return ops.packed_linear(x, layer.packed)
    assert isinstance(layer, nn.Linear)
    return functional.linear(x, layer.weight, layer.bias)


def activation_of(layer: nn.Module) -> str | None:
    """Return the name of the activation that a gated layer applies; None: the layer has none."""
    return layer.activation if isinstance(layer, GatedLinear | PackedLinear) else None


def _num_outputs(layer: nn.Module) -> int:
    if isinstance(layer, PackedLinear):
        return layer.packed.out_features
    assert isinstance(layer, nn.Linear)
    return layer.out_features


def _bias(layer: nn.Module) -> Tensor | None:
    """Return a layer's bias, ``[out_features]`` float32; None: the layer has no bias."""
    bias = getattr(layer, "bias", None)
    return None if bias is None else bias.detach().float()


def row_squares(layer: nn.Module, rows: slice, up: Tensor, down: Tensor) -> Tensor:
    """Return the squared norm of each row of base weight + ``up @ down``: ``[n]``.

    Args:
        layer: the base model's layer.
        rows: the n rows of the base weight that the adapter changes.
        up: ``[n, rank]``, already multiplied by the adapter's scale.
        down: ``[rank, in_features]``.
    """
    squares = [
        (weight + up[first : first + len(weight)] @ down).square().sum(dim=1)
        for first, weight in _weight_rows(layer, rows)
    ]
    return torch.cat(squares)


def _weight_rows(layer: nn.Module, rows: slice) -> Iterator[tuple[int, Tensor]]:
    """Yield the given rows of a layer's weight in float32, `_ROWS` at a time.

    Each piece comes with the index of its first row among the given rows.
    """
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
    """Pack a matrix, ``[outputs, inputs]``, into panels of ``width`` outputs, in ``dtype``."""
    format_ = WeightFormat.of(dtype)
    assert format_ is not None, dtype
    num_rows, num_columns = matrix.shape
    packed = PackedWeight.empty(num_rows, num_columns, format_, width)
    ops.pack_rows(packed, 0, matrix)
    return packed
