"""AdaptedExperts: a mixture of experts in which adapters compute for some tokens.

Tokens without an adapter for these experts go through the mixture as it is. Tokens with one go
through each chosen expert's two layers, one expert after the other:

    halves = first(x) + delta    middle = activation(halves)    result = second(middle) + delta

Refuses to know: routing, which tokens have which adapter, files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton.adapters.digest import AdapterDigest
from baton.adapters.modules import AdapterFiles
from baton_kernels import PackedWeight
from models.adapters.low_rank import Piece, make_low_rank, plain_product, row_squares
from models.adapters.step import StepSpans
from models.adapters.targets import TargetPart
from models.layers.linear import PackedLinear
from models.layers.moe import SparseMoe
from models.recipe import RELU2

# Inputs, experts and their weights; results of shared experts and their gates, if there are some.
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
FIRST, SECOND = "gate_up", "down"  # names of the layers of all experts in a `SparseMoe`


@dataclass(frozen=True, slots=True)
class ExpertsLowRank:
    """An adapter's part of one mixture.

    Attributes:
        parts: products by layer and expert, of experts that the adapter adapts.
    """

    parts: Mapping[tuple[str, int], ops.LowRank]

    @property
    def num_bytes(self) -> int:
        """Return the size in memory."""
        return sum(one.num_bytes for one in self.parts.values())

    def add_to(self, out: Tensor, x: Tensor, layer: str, expert: int) -> None:
        """Adapt an expert's results in place; see ``ops.LowRank``."""
        part = self.parts.get((layer, expert))
        if part is not None:
            ops.add_low_rank(out, x, [ops.LowRankSpan(0, len(x), part)])


class AdaptedExperts:
    """The experts of one mixture beside which adapters compute.

    Args:
        moe: the base model's mixture.
        step: says which tokens have which adapter.

    Attributes:
        loaded: each adapter's part.
    """

    def __init__(self, moe: SparseMoe, step: StepSpans) -> None:
        self._moe, self._step = moe, step
        self.loaded: dict[AdapterDigest, ExpertsLowRank] = {}
        self._layers: dict[tuple[str, int], nn.Module] = {}

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Implement ``AdaptedMix.mix``."""
        found = self._step.found(self.loaded)
        if not found:
            return self._moe.mix(x, ids, weights, shared, gate)
        out, is_plain = torch.empty_like(x), torch.ones(len(x), dtype=torch.bool)

        def inputs(rows: slice | Tensor) -> _Inputs:
            some = [None if one is None else one[rows] for one in (shared, gate)]
            return x[rows], ids[rows], weights[rows], some[0], some[1]

        for rows, part in found:
            is_plain[rows] = False
            out[rows] = self._adapted(part, *inputs(rows))
        others = is_plain.nonzero().flatten()
        if len(others):
            out[others] = self._moe.mix(*inputs(others))
        return out

    def make(
        self, files: AdapterFiles, pieces: Sequence[Piece], dtype: torch.dtype, width: int
    ) -> ExpertsLowRank:
        """Pack an adapter's part; raises AdapterError as ``make_low_rank`` does."""
        found: dict[tuple[str, int], list[Piece]] = defaultdict(list)
        for piece in pieces:
            key = _key(piece.parts[0])
            placed = [self._placed(part, key[0]) for part in piece.parts]
            found[key].append(replace(piece, parts=placed))
        return ExpertsLowRank(
            {
                key: make_low_rank(self._layer(*key), files, of_layer, dtype, width)
                for key, of_layer in found.items()
            }
        )

    def squares(self, part: TargetPart, up: Tensor, down: Tensor) -> Tensor:
        """Return the squares of the norms of a part's adapted rows; see ``row_squares``."""
        name, expert = _key(part)
        return row_squares(self._layer(name, expert), self._placed(part, name).rows, up, down)

    def _adapted(
        self,
        part: ExpertsLowRank,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """Send the tokens of one adapter through their experts."""
        results = x.new_empty(*ids.shape, x.shape[1])  # [num_tokens, top_k, width]
        for expert in sorted(set(ids.flatten().tolist())):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            rows = x[tokens]
            halves = plain_product(self._layer(FIRST, expert), rows)
            part.add_to(halves, rows, FIRST, expert)
            middle = self._middle(halves)
            out = plain_product(self._layer(SECOND, expert), middle)
            part.add_to(out, middle, SECOND, expert)
            results[tokens, places] = out[:, : x.shape[1]]
        total = torch.zeros_like(x, dtype=torch.float32)
        for place in range(ids.shape[1]):
            total += weights[:, place : place + 1] * results[:, place]
        if shared is not None:
            total += shared if gate is None else gate.sigmoid() * shared
        return total.to(x.dtype)

    def _layer(self, name: str, expert: int) -> nn.Module:
        """Return one expert's layer, which shares the weights of all experts' layer."""
        if (name, expert) not in self._layers:
            self._layers[name, expert] = self._make_layer(name, expert)
        return self._layers[name, expert]

    def _make_layer(self, name: str, expert: int) -> nn.Module:
        every = self._moe.get_submodule(name)
        num_rows = self._padded(name) * (self._moe.num_halves if name == FIRST else 1)
        first = expert * num_rows
        if isinstance(every, PackedLinear):
            return PackedLinear(_rows_of(every.packed, first, num_rows))
        assert isinstance(every, nn.Linear)
        one = nn.Linear(every.in_features, num_rows, bias=False, device="meta")
        one.weight = nn.Parameter(every.weight[first : first + num_rows], requires_grad=False)
        if every.bias is not None:
            bias = every.bias[first : first + num_rows]
            one.bias = nn.Parameter(bias, requires_grad=False)
        return one

    def _placed(self, part: TargetPart, name: str) -> TargetPart:
        """Move a target's rows to where an expert's layer has them: packed halves are padded."""
        size, padded = self._size(name), self._padded(name)
        half = part.rows.start // size if part.rows.start else 0
        start = half * padded
        return replace(part, rows=slice(start, start + size))

    def _middle(self, halves: Tensor) -> Tensor:
        activation = self._moe.activation
        if activation == RELU2:
            middle = ops.gate_mul(halves, halves, "relu")
        else:
            middle = ops.gated_mul(halves, activation)
        return middle[:, : self._moe.inner_size].contiguous()

    def _size(self, name: str) -> int:
        return self._moe.inner_size if name == FIRST else self._moe.width

    def _padded(self, name: str) -> int:
        """Count the rows of an expert's half or output, with the padding of packed weights."""
        every, size = self._moe.get_submodule(name), self._size(name)
        return every.packed.in_whole_panels(size) if isinstance(every, PackedLinear) else size


def _key(part: TargetPart) -> tuple[str, int]:
    """Return the layer and the expert of a part."""
    assert part.expert is not None
    return part.path.rpartition(".")[2], part.expert


def _rows_of(weight: PackedWeight, first: int, num_rows: int) -> PackedWeight:
    """Return some rows of a packed weight, in whole panels, without copying them."""
    rows = slice(first, first + num_rows)
    panels = slice(first // weight.width, (first + num_rows) // weight.width)
    return replace(
        weight,
        panels=weight.panels[panels],
        scales=None if weight.scales is None else weight.scales[rows],
        groups=None if weight.groups is None else weight.groups.map(lambda one: one[panels]),
        bias=None if weight.bias is None else weight.bias[rows],
        out_features=num_rows,
    )
