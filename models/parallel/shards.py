"""Shards: a rank's part of a model's dimensions, and of a checkpoint's tensors.

On each rank, a column-parallel layer keeps some of its outputs, and a row-parallel layer some of
its inputs; the results of row-parallel layers are summed over all ranks (Shoeybi et al.,
arXiv:1909.08053). Refuses to know: layers, files.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.api.errors import ConfigError
from baton.kv.manifest import shard, stage_span

Span = tuple[int, int]  # first index of a share of an axis, and the index after the last
# Size of the largest quantization groups, in adjacent inputs. Where possible, axes are divided at
# multiples of this size, so that no group is on two ranks.
_WHOLE_GROUPS = 128


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the ranks that divide a model's layers.

    Attributes:
        rank: index of the rank, from 0.
        size: number of ranks.
        expert_parallel: ``on``: each rank has whole experts; ``off``: a part of every expert;
            ``auto``: the division that is faster (`models.parallel.experts`).
    """

    rank: int = 0
    size: int = 1
    expert_parallel: str = "auto"

    def span(self, size: int) -> Span:
        """Return this rank's share of an axis of ``size`` indices; shares differ by at most 1.

        Raises ConfigError if there are fewer indices than ranks.
        """
        if size < self.size:
            raise ConfigError(
                f"tensor_parallel_size: {self.size} ranks cannot share {size} parts of a layer"
            )
        return shard(size, self.rank, self.size)

    def wide_span(self, size: int) -> Span:
        """Return this rank's share of an axis, without dividing quantization groups if possible."""
        if size % _WHOLE_GROUPS or size // _WHOLE_GROUPS < self.size:
            return self.span(size)
        first, end = self.span(size // _WHOLE_GROUPS)
        return first * _WHOLE_GROUPS, end * _WHOLE_GROUPS

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Span, Span]:
        """Return this rank's query heads, and its KV heads.

        If there are more ranks than KV heads, several ranks hold the same KV head, and divide the
        query heads that read it.

        Raises ConfigError if there are fewer query heads than ranks.
        """
        per_group = num_heads // num_kv_heads
        first, end = shard(num_kv_heads, self.rank, self.size)
        if self.size <= num_kv_heads:
            return (first * per_group, end * per_group), (first, end)
        same = [r for r in range(self.size) if shard(num_kv_heads, r, self.size)[0] == first]
        if len(same) > per_group:
            raise ConfigError(
                f"tensor_parallel_size: {self.size} ranks cannot share {num_heads} query heads of "
                f"{num_kv_heads} groups"
            )
        own = shard(per_group, same.index(self.rank), len(same))
        return (first * per_group + own[0], first * per_group + own[1]), (first, end)


def stage_layers(
    num_layers: int, stage: int, num_stages: int, numbers: tuple[int, ...] = ()
) -> Span:
    """Return the layers of a pipeline stage.

    Args:
        numbers: number of layers of each stage; empty: all stages have equal numbers.

    Raises:
        ConfigError: there are fewer layers than stages, or ``numbers`` do not sum to the layers.
    """
    if numbers and sum(numbers) != num_layers:
        raise ConfigError(
            f"pipeline_layers: must be {num_layers} layers together, as the model has, "
            f"got {sum(numbers)}"
        )
    if num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size: {num_stages} stages cannot share {num_layers} layers"
        )
    return stage_span(num_layers, stage, num_stages, numbers)


def scaled(span: Span, factor: int) -> Span:
    """Turn a span of heads into the span of their elements; each head has ``factor`` elements."""
    return span[0] * factor, span[1] * factor


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a checkpoint's tensor that a rank keeps.

    Attributes:
        shape: shape of the whole tensor.
        rows: the rows that are kept.
        columns: the columns of these rows that are kept; None: all.
        is_zero: whether this rank replaces the tensor by zeros, because results are summed and
            another rank adds the tensor (such as a bias).
    """

    shape: tuple[int, ...]
    rows: slice | Tensor | None = None  # None: all
    columns: slice | None = None
    is_zero: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Take this rank's part of a checkpoint's tensor."""
        rows = tensor if self.rows is None else tensor[self.rows]
        if self.columns is not None:
            rows = rows[:, self.columns].contiguous()
        return rows.new_zeros(()).expand_as(rows) if self.is_zero else rows


KeptParts = dict[str, Kept]  # by the checkpoint's name within the layer
