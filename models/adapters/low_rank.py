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
from baton.adapters.files import AdaptedModule, Adapter, AdapterTensor
from baton_kernels import PackedWeight, WeightFormat
from models.adapters.targets import Target
from models.layers.linear import GatedLinear, PackedLinear

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROWS = 1024  # rows of a base weight that are unpacked at a time


def make_low_rank(
    layer: nn.Module,
    path: str,
    adapter: Adapter,
    modules: Sequence[tuple[AdaptedModule, Target]],
    dtype: torch.dtype,
    width: int,
) -> ops.LowRank:
    """Pack an adapter's part of one layer.

    Args:
        layer: the base model's layer, whose weight DoRA needs.
        path: the layer's path in the model.
        modules: the adapter's modules that are parts of this layer.
        dtype: type that the model computes in.
        width: outputs of a panel.

    Raises:
        AdapterError: a number is too large for ``dtype``, or a row of the adapted weight is 0.
    """
    down = torch.cat([_read(adapter, module.a) for module, _ in modules])  # [sum of ranks, in]
    parts: list[ops.LowRankPart] = []
    first_rank = 0
    for module, target in modules:
        stored = _read(adapter, module.b) * module.scale  # [num_outputs of the target, rank]
        own_down = down[first_rank : first_rank + module.rank]
        for part in target.parts:
            if part.path != path:
                continue
            up = part.of(stored)
            gains: Tensor | None = None
            shifts: Tensor | None = None
            if module.magnitude is not None:
                norms = _row_norms(layer, part.rows, up, own_down)
                if not bool((norms > 0).all()):
                    raise adapter.files.wrong(module.b, "a row of the adapted weight is 0")
                gains = part.of(_read(adapter, module.magnitude)) / norms
                up = up * gains.unsqueeze(1)
                bias = _bias(layer)
                shifts = None if bias is None else bias[part.rows] * (1 - gains)
            packed = _pack(adapter, module.b, up, dtype, width)
            first_column = part.rows.indices(_num_outputs(layer))[0]
            parts.append(ops.LowRankPart(first_rank, first_column, packed, gains, shifts))
        first_rank += module.rank
    return ops.LowRank(_pack(adapter, modules[0][0].a, down, dtype, width), tuple(parts))


def plain_product(layer: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's product without its activation: ``[n, in]`` -> ``[n, out_features]``."""
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


def _read(adapter: Adapter, tensor: AdapterTensor) -> Tensor:
    """Return a tensor of an adapter in float32."""
    numbers = torch.frombuffer(adapter.data[tensor.name], dtype=_DTYPES[tensor.dtype])
    return numbers.view(tensor.shape).float()


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


def _pack(
    adapter: Adapter, tensor: AdapterTensor, matrix: Tensor, dtype: torch.dtype, width: int
) -> PackedWeight:
    """Pack a matrix in panels; raise AdapterError, which names ``tensor``, unless it is finite."""
    if not bool(matrix.to(dtype).isfinite().all()):
        problem = f"a number is too large for {dtype}".replace("torch.", "")
        raise adapter.files.wrong(tensor, problem)
    format_ = WeightFormat.of(dtype)
    assert format_ is not None, dtype
    num_rows, num_columns = matrix.shape
    packed = PackedWeight.empty(num_rows, num_columns, format_, width)
    ops.pack_rows(packed, 0, matrix)
    return packed
