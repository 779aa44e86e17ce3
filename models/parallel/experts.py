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


def expert_share(rank: Rank, num_experts: int, inner_size: int) -> ExpertShare | None:
    """Return which experts of a layer a rank has; None: the rank has a part of every expert.

    Args:
        rank: the rank, and its choice of ``--expert-parallel``.
        num_experts: number of the layer's experts.
        inner_size: intermediate size of an expert.

    Raises:
        ConfigError: whole experts are wanted, but there are fewer experts than ranks.
    """
    if rank.size == 1 or rank.expert_parallel == "off":
        return None
    if rank.expert_parallel == "on" and num_experts < rank.size:
        raise ConfigError(f"expert_parallel: {rank.size} ranks cannot share {num_experts} experts")
    if rank.expert_parallel == "auto" and not _is_faster(rank, num_experts, inner_size):
        return None
    return ExpertShare(rank.rank, rank.size)


def _is_faster(rank: Rank, num_experts: int, inner_size: int) -> bool:
    return False
