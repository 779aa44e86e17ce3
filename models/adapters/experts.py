"""AdaptedExperts: a mixture of experts with LoRA adapters for some tokens.

Tokens without an adapter for these experts go through the unchanged mixture. All other tokens are
sorted by expert and adapter. Each expert's two layers then compute these tokens, and a delta, the
product of the token's adapter, is added to the result of each layer:

    halves = first(x) + delta    middle = activation(halves)    result = second(middle) + delta

Refuses to know: how experts are chosen for a token, which tokens have which adapter, files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

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

# The arguments of `mix` for some tokens: x, ids, weights, shared, gate.
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
FIRST, SECOND = "gate_up", "down"  # names of the experts' two layers in a `SparseMoe`
_NO_ADAPTER = -1


@dataclass(frozen=True, slots=True)
class ExpertsLowRank:
    """One adapter's matrices for one mixture of experts.

    Attributes:
        parts: matrices of each adapted layer, by the layer's name and the expert's number.
    """

    parts: Mapping[tuple[str, int], ops.LowRank]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that all matrices take."""
        return sum(one.num_bytes for one in self.parts.values())


class _Group(NamedTuple):
    """Adjacent rows whose tokens use one adapter and go through one expert."""

    expert: int
    adapter: int
    num_rows: int


class AdaptedExperts:
    """A mixture of experts in which tokens may use adapters of the experts' layers.

    Args:
        moe: the base model's mixture.
        step: tells which tokens have which adapter.

    Attributes:
        loaded: matrices of the loaded adapters, by adapter digest.
    """

    def __init__(self, moe: SparseMoe, step: StepSpans) -> None:
        self._moe, self._step = moe, step
        self.loaded: dict[AdapterDigest, ExpertsLowRank] = {}
        self._layers: dict[tuple[str, int], nn.Module] = {}

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Compute the mixture of experts, with adapters; see ``AdaptedMix.mix``."""
        found = self._step.found(self.loaded)
        if not found:
            return self._moe.mix(x, ids, weights, shared, gate)
        adapters = torch.full((len(x),), _NO_ADAPTER)  # [num_tokens], indices of `found`
        for index, (rows, _) in enumerate(found):
            adapters[rows] = index
        plain = (adapters == _NO_ADAPTER).nonzero().flatten()
        adapted = (adapters != _NO_ADAPTER).nonzero().flatten()

        def inputs(tokens: Tensor) -> _Inputs:
            some = [None if one is None else one[tokens] for one in (shared, gate)]
            return x[tokens], ids[tokens], weights[tokens], some[0], some[1]

        # Count all tokens together, because ranks wait for each other once per layer: the rank with
        # the most rows of tokens with adapters may have few rows of other tokens.
        if self._moe.loads is not None:
            ops.count_loads(ids, self._moe.share, self._moe.loads)
        out = torch.empty_like(x)
        parts = [part for _, part in found]
        out[adapted] = self._adapted(parts, adapters[adapted], *inputs(adapted))
        if len(plain):
            out[plain] = self._moe.mix(*inputs(plain), is_counted=False)
        return out

    def make(
        self, files: AdapterFiles, pieces: Sequence[Piece], dtype: torch.dtype, width: int
    ) -> ExpertsLowRank:
        """Pack an adapter's matrices for these experts; raises AdapterError."""
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
        """Return, for each row of a part, the squared norm of base weight + adapter."""
        name, expert = _key(part)
        return row_squares(self._layer(name, expert), self._placed(part, name).rows, up, down)

    def _adapted(
        self,
        parts: Sequence[ExpertsLowRank],
        adapters: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        """Compute the mixture's result, ``[num_tokens, width]``, for tokens that have adapters.

        Args:
            parts: the adapters' matrices.
            adapters: ``[num_tokens]``, each token's index into ``parts``.
        """
        num_tokens, top_k = ids.shape
        # A row is a pair of a token and one of its experts. Rows are sorted by expert and adapter.
        keys = (ids * len(parts) + adapters.unsqueeze(1)).flatten()  # [num_tokens * top_k]
        order = keys.argsort(stable=True)
        share = self._moe.share
        if share.size > 1:  # other ranks compute the rows of their experts
            order = order[(ids.flatten() % share.size == share.rank)[order]]
        results = x.new_zeros(num_tokens * top_k, x.shape[1])
        if len(order):
            results[order] = self._results(parts, keys[order], x[order // top_k])
        results = results.view(num_tokens, top_k, -1)
        total = torch.zeros_like(x, dtype=torch.float32)
        for place in range(top_k):
            total += weights[:, place : place + 1] * results[:, place]
        if shared is not None:
            total += shared if gate is None else gate.sigmoid() * shared
        return total.to(x.dtype)

    def _results(self, parts: Sequence[ExpertsLowRank], keys: Tensor, rows: Tensor) -> Tensor:
        """Return the experts' results for rows that are sorted by expert and adapter.

        Args:
            keys: each row's expert times the number of adapters, plus the row's adapter.
            rows: ``[num_rows, width]``, the experts' inputs.
        """
        found, counts = torch.unique_consecutive(keys, return_counts=True)
        groups = [
            _Group(key // len(parts), key % len(parts), count)
            for key, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        middle = self._middle(self._products(FIRST, rows, groups, parts))
        products = self._products(SECOND, middle, groups, parts)
        return products[:, : self._moe.width]

    def _products(
        self, name: str, rows: Tensor, groups: Sequence[_Group], parts: Sequence[ExpertsLowRank]
    ) -> Tensor:
        """Apply each row's expert and adapter in one layer; return ``[num_rows, outputs]``.

        One call multiplies all rows of an expert; one further call adds all adapters' products.
        """
        made: list[Tensor] = []
        spans: list[ops.LowRankSpan] = []
        first = 0
        for expert, same in groupby(groups, key=lambda one: one.expert):
            begin = first
            for group in same:
                part = parts[group.adapter].parts.get((name, expert))
                if part is not None:
                    spans.append(ops.LowRankSpan(first, first + group.num_rows, part))
                first += group.num_rows
            made.append(plain_product(self._layer(name, expert), rows[begin:first]))
        out = torch.cat(made)
        if spans:
            ops.add_low_rank(out, rows, spans)
        return out

    def _layer(self, name: str, expert: int) -> nn.Module:
        """Return one expert's layer; its weight is a view of the weight of all experts."""
        if (name, expert) not in self._layers:
            self._layers[name, expert] = self._make_layer(name, expert)
        return self._layers[name, expert]

    def _make_layer(self, name: str, expert: int) -> nn.Module:
        every = self._moe.get_submodule(name)
        num_rows = self._padded(name) * (self._moe.num_halves if name == FIRST else 1)
        first = expert // self._moe.share.size * num_rows
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
        """Return a part whose rows are indices in the expert's packed (padded) layer."""
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
        """Return the number of rows, with padding, of a half of layer FIRST or of layer SECOND."""
        every, size = self._moe.get_submodule(name), self._size(name)
        return every.packed.in_whole_panels(size) if isinstance(every, PackedLinear) else size


def _key(part: TargetPart) -> tuple[str, int]:
    """Return the name of the layer and the number of the expert that a part belongs to."""
    assert part.expert is not None
    return part.path.rpartition(".")[2], part.expert


def _rows_of(weight: PackedWeight, first: int, num_rows: int) -> PackedWeight:
    """Return some rows of a packed weight as a view; the rows must fill whole panels."""
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
