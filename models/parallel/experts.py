"""Expert parallelism: whether each rank has some whole experts, or a part of every expert.

Every rank of a stage has all tokens of a step, because the sum after the mixer gives each rank the
whole residual stream. So no tokens are sent before the experts: each rank computes its own experts'
rows, and the sum over the ranks, which both divisions need, joins the results (ADR 0113).
Refuses to know: layers, files, how experts are computed.
"""

from __future__ import annotations

from baton.api.errors import ConfigError
from baton_kernels import ExpertShare
from models.parallel.shards import Rank

# Measured: if the largest part of an expert exceeds the mean part by this factor, whole experts per
# rank are faster.
_UNEQUAL = 1.3


def expert_share(rank: Rank, num_experts: int, inner_size: int) -> ExpertShare | None:
    """Return which experts of a layer a rank has; None: the rank has a part of every expert.

    Args:
        rank: the rank, and its choice of ``--expert-parallel``.
        num_experts: number of the layer's experts.
        inner_size: intermediate size of an expert.

    Raises:
        ConfigError: whole experts are wanted, but there are fewer experts than ranks.
    """
    choice = rank.expert_parallel
    if rank.size == 1 or choice == "off" or (choice == "auto" and not _is_faster(rank, inner_size)):
        return None
    if num_experts < rank.size:
        if choice == "auto":
            return None
        raise ConfigError(f"expert_parallel: {rank.size} ranks cannot share {num_experts} experts")
    return ExpertShare(rank.rank, rank.size)


def _is_faster(rank: Rank, inner_size: int) -> bool:
    """Return whether whole experts are faster with many tokens, and not slower with one token.

    Many tokens are computed faster if the parts of an expert are unequal. With more than two ranks,
    a single token would take longer, because its few experts are spread unevenly over the ranks.
    """
    spans = [Rank(index, rank.size).wide_span(inner_size) for index in range(rank.size)]
    largest = max(end - first for first, end in spans)
    return rank.size == 2 and largest * rank.size >= _UNEQUAL * inner_size
