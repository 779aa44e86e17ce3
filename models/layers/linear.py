"""Linear layers that torch lacks: fused projections, packed and quantized weights.

A fused projection computes several projections of one input in one kernel. Refuses to know: what
the projections are used for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from models.layers.computing import Computing
from models.parallel.shards import Kept, KeptParts, Span


class ExactLinear(nn.Linear):
    """A small linear layer that is never quantized, because rounding would change its results much.

    An example is the router of experts.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer in float32: map ``[..., in_features]`` to ``[..., out_features]``."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias)


class JoinedLinear(nn.Linear):
    """Several projections of one input, stacked along the output.

    Args:
        in_features: number of inputs, which all parts read.
        parts: name of each part in the checkpoint -> its number of rows, in output order.
        bias: whether each part has a bias.
        stored_joined: whether checkpoints have one tensor for all parts, under this layer's name.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        stored_joined: bool = False,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self._parts = dict(parts)
        self.stored_joined = stored_joined

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Return the number of rows of each part."""
        return tuple(self._parts.values())

    def part_rows(self) -> Iterator[tuple[str, slice]]:
        """Yield each part's name, and the rows of weight and bias that the part has."""
        start = 0
        for name, size in self._parts.items():
            yield name, slice(start, start + size)
            start += size

    def row_order(self, name: str) -> Tensor | None:
        """Return where the checkpoint's tensor has each row of a part.

        Returns row indices, int64; None: the checkpoint has the rows in the same order.
        """
        return None

    def stored_name(self, name: str) -> str:
        """Return the name of the checkpoint's tensor that contains a part's rows."""
        return name

    def stored_rows(self, name: str) -> int:
        """Return the number of rows of the checkpoint's tensor that contains a part."""
        return self._parts[name]

    def keep_parts(self, spans: Sequence[Span]) -> KeptParts:
        """Keep the given rows of each part; return what to read of the checkpoint's tensors."""
        kept: KeptParts = {}
        rows: list[int] = []
        for (name, of_part), (first, end) in zip(self.part_rows(), spans, strict=True):
            size, order = self.stored_rows(name), self.row_order(name)
            here = slice(first, end) if order is None else order[first:end]
            for attribute, parameter in self.named_parameters():
                shape = (size, *parameter.shape[1:])
                kept[f"{name}.{attribute}"] = Kept(shape, here)
            rows += range(of_part.start + first, of_part.start + end)
            self._parts[name] = end - first
        if not self.stored_joined:
            return kept
        index = torch.tensor(rows, device="cpu")
        return {name: Kept(tuple(one.shape), index) for name, one in self.named_parameters()}


class ExpertsLinear(JoinedLinear):
    """The projections of all experts, of equal sizes; a packed panel never mixes two experts."""


class HeadsInPairs(JoinedLinear):
    """Projections to rotated heads; checkpoints store a head's rotated dims in adjacent pairs::

        in a checkpoint    | 0 1 | 2 3 | 4 5 | 6 7 |  a head's rotated dims; then the other dims
        in this layer      | 0 2 4 6 | 1 3 5 7 |

    Args:
        in_features: number of inputs, which all parts read.
        parts: name of each part in the checkpoint -> its number of rows.
        turning: names of the parts whose heads are rotated.
        head_dim: number of rows of a head.
        rotary_dim: number of rows of a head that are rotated.
        bias: whether each part has a bias.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        turning: Sequence[str],
        head_dim: int,
        rotary_dim: int,
        *,
        bias: bool,
    ) -> None:
        super().__init__(in_features, parts, bias=bias)
        self._turning, self._head_dim, self._rotary_dim = tuple(turning), head_dim, rotary_dim

    def row_order(self, name: str) -> Tensor | None:
        """Return where the checkpoint's tensor has each row of a part; None: in the same order."""
        if name not in self._turning:
            return None
        heads = torch.arange(self._parts[name], device="cpu").view(-1, self._head_dim)
        turning, others = heads[:, : self._rotary_dim], heads[:, self._rotary_dim :]
        return torch.cat([turning[:, 0::2], turning[:, 1::2], others], dim=1).flatten()


class HeadsWithGates(JoinedLinear):
    """Query, key and value projections; checkpoints store a gate after each query head::

        in a checkpoint    q_proj: | query of head 0 | gate of head 0 | query of head 1 | ...
        in this layer      | queries | keys | values | gates |

    Args:
        in_features: number of inputs, which all parts read.
        parts: name of each part in the checkpoint -> its number of rows in this layer, not counting
            gates; the queries' part comes first.
        head_dim: number of rows of a head.
        bias: whether each part has a bias.
    """

    _GATES = "gates"

    def __init__(
        self, in_features: int, parts: Mapping[str, int], head_dim: int, *, bias: bool
    ) -> None:
        self._query, self._head_dim = next(iter(parts)), head_dim
        self._num_rows = 2 * parts[self._query]
        super().__init__(in_features, {**parts, self._GATES: parts[self._query]}, bias=bias)

    def stored_name(self, name: str) -> str:
        """Return the name of the checkpoint's tensor that contains a part's rows."""
        return self._query if name == self._GATES else name

    def stored_rows(self, name: str) -> int:
        """Return the number of rows of the checkpoint's tensor that contains a part."""
        return self._num_rows if self.row_order(name) is not None else super().stored_rows(name)

    def row_order(self, name: str) -> Tensor | None:
        """Return where the checkpoint's tensor has each row of a part; None: in the same order."""
        if name not in (self._query, self._GATES):
            return None
        rows = torch.arange(self._num_rows, device="cpu").view(-1, 2, self._head_dim)
        return rows[:, int(name == self._GATES)].flatten()


class KeysAsValues(JoinedLinear):
    """Query, key and value projections; checkpoints have one tensor for keys and values."""

    def stored_name(self, name: str) -> str:
        """Return the name of the checkpoint's tensor that contains a part's rows."""
        return "k_proj" if name == "v_proj" else name


class RegroupedLinear(JoinedLinear):
    """Several projections of one input; checkpoints store the projections' rows by group::

        in a checkpoint    | a of group 0 | b of group 0 | a of group 1 | b of group 1 | ...
        in this layer      | a of group 0 | a of group 1 | ... | b of group 0 | b of group 1 | ...

    Args:
        in_features: number of inputs, which all parts read.
        num_groups: number of groups of each projection.
        parts: name of each tensor in the checkpoint -> rows within a group of each projection that
            the tensor contains.
        bias: whether each part has a bias.
    """

    def __init__(
        self, in_features: int, num_groups: int, parts: Mapping[str, Sequence[int]], *, bias: bool
    ) -> None:
        sizes = {name: num_groups * sum(pieces) for name, pieces in parts.items()}
        super().__init__(in_features, sizes, bias=bias)
        self._num_groups = num_groups
        self._pieces = dict(parts)

    def row_order(self, name: str) -> Tensor:
        """Return where the checkpoint's tensor has each row of a part; None: in the same order."""
        pieces = self._pieces[name]
        rows = torch.arange(self._num_groups * sum(pieces), device="cpu")
        by_group = torch.split(rows.view(self._num_groups, -1), list(pieces), dim=1)
        return torch.cat([piece.flatten() for piece in by_group])


class GatedLinear(JoinedLinear, Computing):
    """Two fused projections of equal size; the result is ``activation(first) * second``.

    Args:
        in_features: number of inputs, which both parts read.
        parts: name of each part in the checkpoint -> its number of rows, in output order.
        bias: whether each part has a bias.
        activation: activation of the first part, one of ``ops.ACTIVATIONS``.
        stored_joined: whether checkpoints have one tensor for both parts, under this layer's name.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        activation: str = "silu",
        stored_joined: bool = False,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, stored_joined=stored_joined)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated result, ``[..., out_features / 2]``, for ``[..., in_features]``."""
        return self.ops.gated_mul(super().forward(x), self.activation)


class PackedLinear(Computing):
    """A linear layer on a CPU that computes with a packed weight; made from a loaded layer.

    Args:
        weight: the packed weight, with the bias; never written.
        activation: activation of the original ``GatedLinear``; None: the original was not gated.
        exact: whether the original was an ``ExactLinear``.

    Attributes:
        packed: the packed weight.
        activation: the argument, unchanged.
    """

    def __init__(
        self, weight: ops.PackedWeight, *, activation: str | None = None, exact: bool = False
    ) -> None:
        super().__init__()
        self.activation, self._is_exact = activation, exact
        self.packed = weight
        # the panels are parameters, so that code that counts a model's memory finds them
        self.weight = nn.Parameter(weight.panels, requires_grad=False)
        self.bias = None if weight.bias is None else nn.Parameter(weight.bias, requires_grad=False)
        groups = () if weight.groups is None else weight.groups.tensors
        scales = (weight.scales, *groups)
        self.scales = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False) for tensor in scales if tensor is not None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the original layer's result from the packed weight."""
        if self._is_exact:
            return self.ops.packed_scores(x, self.packed)
        if self.activation is None:
            return self.ops.packed_linear(x, self.packed)
        return self.ops.packed_gated_linear(x, self.packed, self.activation)


class QuantizedLinear(Computing):
    """A linear layer on a GPU with 4 or 8 bits per weight; made from a loaded layer.

    Args:
        weight: the quantized weight, on the GPU.
        bias: ``[out_features]``.
        activation: activation of the original ``GatedLinear``; None: the original was not gated.
    """

    def __init__(
        self, weight: ops.QuantizedWeight, bias: Tensor | None, activation: str | None = None
    ) -> None:
        super().__init__()
        self._activation = activation
        self.quantized = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # the tensors are parameters, so that code that counts a model's memory finds them
        self.numbers = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False) for tensor in weight.tensors
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the original layer's result from the quantized weight."""
        out = self.ops.quantized_linear(x, self.quantized, self.bias)
        return out if self._activation is None else self.ops.gated_mul(out, self._activation)


class InvariantLinear(Computing):
    """A linear layer on a GPU whose result for a token does not depend on the batch.

    Args:
        weight: ``[out_features, in_features]``, shared with the original layer.
        bias: ``[out_features]``.
        activation: activation of the original ``GatedLinear``; None: the original was not gated.
        exact: whether the original was an ``ExactLinear``.
    """

    _arrived: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._activation, self._is_exact = activation, exact
        self.weight, self.bias = weight, bias
        arrived = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        self.register_buffer("_arrived", arrived, persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> InvariantLinear:
        """Make a batch-invariant layer that shares the weight of a loaded layer."""
        activation = linear.activation if isinstance(linear, GatedLinear) else None
        exact = isinstance(linear, ExactLinear)
        return cls(linear.weight, linear.bias, activation=activation, exact=exact)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the original layer's result, with equal bits in every batch."""
        if self._is_exact:
            bias = None if self.bias is None else self.bias.float()
            return self.ops.invariant_linear(x.float(), self.weight.float(), bias, self._arrived)
        out = self.ops.invariant_linear(x, self.weight, self.bias, self._arrived)
        return out if self._activation is None else self.ops.gated_mul(out, self._activation)


def keep_outputs(linear: nn.Linear, *spans: Span) -> None:
    """Make a layer column-parallel: keep some of its outputs. Call before weights are loaded.

    Args:
        linear: the layer.
        spans: the outputs to keep; for a ``JoinedLinear``, one span per part.
    """
    if isinstance(linear, JoinedLinear):
        kept = linear.keep_parts(spans)
    else:
        ((first, end),) = spans
        kept = {
            name: Kept(tuple(one.shape), slice(first, end))
            for name, one in linear.named_parameters()
        }
    linear.out_features = sum(end - first for first, end in spans)
    _resize(linear, kept)


def keep_inputs(linear: nn.Linear, span: Span, *, adds_bias: bool) -> None:
    """Make a layer row-parallel: keep some of its inputs. Call before weights are loaded.

    Args:
        linear: the layer; the caller sums its results over all ranks.
        span: the inputs to keep.
        adds_bias: whether this rank adds the bias.
    """
    kept: KeptParts = {}
    for name, one in linear.named_parameters():
        columns = slice(*span) if one.dim() == 2 else None
        is_zero = one.dim() == 1 and not adds_bias
        if isinstance(linear, JoinedLinear) and not linear.stored_joined:
            for part, rows in linear.part_rows():
                shape = (rows.stop - rows.start, *one.shape[1:])
                kept[f"{part}.{name}"] = Kept(shape, columns=columns, is_zero=is_zero)
        else:
            kept[name] = Kept(tuple(one.shape), columns=columns, is_zero=is_zero)
    linear.in_features = span[1] - span[0]
    _resize(linear, kept)


def _resize(linear: nn.Linear, kept: KeptParts) -> None:
    """Resize a layer's parameters, and record which parts of the checkpoint they keep."""
    linear.kept = kept  # type: ignore[assignment]
    linear.weight = nn.Parameter(torch.empty(linear.out_features, linear.in_features))
    if linear.bias is not None:
        linear.bias = nn.Parameter(torch.empty(linear.out_features))


def keep_elements(module: nn.Module, attribute: str, span: Span) -> None:
    """Keep some elements along a parameter's first axis; call before weights are loaded."""
    parameter = getattr(module, attribute)
    kept: KeptParts = dict(getattr(module, "kept", {}))
    kept[attribute] = Kept(tuple(parameter.shape), slice(*span))
    module.kept = kept  # type: ignore[assignment]
    shape = (span[1] - span[0], *parameter.shape[1:])
    setattr(module, attribute, nn.Parameter(torch.empty(shape)))


__all__ = [
    "ExactLinear",
    "GatedLinear",
    "HeadsInPairs",
    "HeadsWithGates",
    "InvariantLinear",
    "JoinedLinear",
    "KeysAsValues",
    "PackedLinear",
    "QuantizedLinear",
    "RegroupedLinear",
    "keep_elements",
    "keep_inputs",
    "keep_outputs",
]


class LabelHead(nn.Module):
    """The head of a classification model: computes a logit per label.

    The class does not derive from ``nn.Linear``, so that no packer rounds its small weight.
    """

    def __init__(self, num_labels: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the labels' logits, ``[n, num_labels]``, for ``[n, hidden_size]``."""
        return functional.linear(hidden, self.weight)
