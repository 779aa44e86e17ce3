"""LowRank and LowRankSlots: matrices by which LoRA adapters change a layer, on CPUs and on GPUs.

    out = out * gains + (x @ A.T) @ B.T + shifts

Several modules of an adapter may change one layer, such as query, key and value of a joined
projection. The rows of A of these modules are stacked, and each module has a separate B::

    A = [ A of q ]    B of q --> columns of q
        [ A of k ]    B of k --> columns of k
        [ A of v ]    B of v --> columns of v

Refuses to know: files, which request a row belongs to, which kernel computes the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton_kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPart:
    """One module of an adapter: the columns of a layer's output that it changes, and how.

    Attributes:
        first_rank: index of this module's first row in A.
        first_column: index of the first column that the module changes.
        b: ``[num_columns, rank]``, already multiplied by the adapter's scale.
        gains: ``[num_columns]`` float32, factors of the layer's own product; None: all are 1.
        shifts: ``[num_columns]`` float32, added to the columns; None: all are 0.
    """

    first_rank: int
    first_column: int
    b: PackedWeight
    gains: Tensor | None = None
    shifts: Tensor | None = None

    @property
    def ranks(self) -> slice:
        """Return which rows of A belong to this module."""
        return slice(self.first_rank, self.first_rank + self.b.in_features)

    @property
    def columns(self) -> slice:
        """Return which columns of the layer's output the module changes."""
        return slice(self.first_column, self.first_column + self.b.out_features)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """An adapter's matrices for one layer.

    Attributes:
        a: ``[rank, in_features]``, the rows of A of all parts.
        parts: the adapter's modules; a column is changed by at most one of them.
    """

    a: PackedWeight
    parts: tuple[LowRankPart, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the matrices."""
        found = [*self.a.tensors]
        for part in self.parts:
            found += (*part.b.tensors, part.gains, part.shifts)
        return tuple(tensor for tensor in found if tensor is not None)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that all matrices take."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankSpan:
    """The rows ``[first, end)`` of a step, and the matrices of the adapter that they use."""

    first: int
    end: int
    low_rank: LowRank


@dataclass(frozen=True, slots=True, eq=False)
class LowRankSlots:
    """Adapters' matrices for one layer on a GPU, at addresses that do not change.

    A slot has one adapter or none. When a slot gets another adapter, the addresses stay, so
    captured CUDA graphs stay valid.

    Attributes:
        a: ``[num_slots, num_parts, max_rank, in_features]``.
        b: ``[num_slots, out_features, max_rank]``, already multiplied by the adapters' scales.
        ranks: ``[num_slots, num_parts]`` int32, the rank of each part's module; 0: the adapter does
            not change the part's columns.
        first_columns: ``[num_parts + 1]`` int32, the first column of each part, then the end of the
            last part.
        most_columns: number of columns of the widest part.
        gains: ``[num_slots, out_features]`` float32, factors of the layer's own product; None: all
            are 1.
        shifts: ``[num_slots, out_features]`` float32, added to the results; None if there are no
            gains.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    first_columns: Tensor
    most_columns: int
    gains: Tensor | None = None
    shifts: Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        return len(self.a)

    @classmethod
    def empty(
        cls,
        like: Tensor,
        num_slots: int,
        max_rank: int,
        in_features: int,
        columns: Sequence[int],
        *,
        has_gains: bool,
    ) -> LowRankSlots:
        """Allocate slots without adapters.

        Args:
            like: a tensor with the device and dtype that the matrices get.
            num_slots: number of slots.
            max_rank: largest rank of an adapter's module.
            in_features: number of inputs of the layer.
            columns: number of columns of each part; parts are adjacent.
            has_gains: whether adapters may have gains and shifts.
        """
        ends = list(accumulate(columns))
        num_columns = ends[-1]
        return cls(
            like.new_zeros(num_slots, len(columns), max_rank, in_features),
            like.new_zeros(num_slots, num_columns, max_rank),
            like.new_zeros(num_slots, len(columns), dtype=torch.int32),
            torch.tensor([0, *ends], dtype=torch.int32, device=like.device),
            max(columns),
            like.new_ones(num_slots, num_columns, dtype=torch.float32) if has_gains else None,
            like.new_zeros(num_slots, num_columns, dtype=torch.float32) if has_gains else None,
        )

    def write(
        self,
        slot: int,
        part: int,
        down: Tensor,
        up: Tensor,
        gains: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> None:
        """Write one module of an adapter into its part of a slot.

        Args:
            slot: index of the slot.
            part: index of the part of the layer's output that the module changes.
            down: ``[rank, in_features]``.
            up: ``[num_columns, rank]``, already multiplied by the adapter's scale.
            gains: ``[num_columns]``, factors of the layer's own product; None: all are 1.
            shifts: ``[num_columns]``, added to the layer's own product; None: all are 0.
        """
        rank, columns = len(down), self.columns(part)
        assert rank <= self.a.shape[2]
        self.a[slot, part, :rank] = down
        self.b[slot, columns, :rank] = up
        if self.gains is not None and self.shifts is not None:
            self.gains[slot, columns] = 1 if gains is None else gains
            self.shifts[slot, columns] = 0 if shifts is None else shifts
        self.ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        """Remove the adapter of a slot."""
        self.ranks[slot] = 0

    def columns(self, part: int) -> slice:
        """Return the columns of the layer's output that belong to a part."""
        first, end = self.first_columns[part : part + 2].tolist()
        return slice(first, end)
