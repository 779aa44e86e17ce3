"""Routing: the rule by which a mixture-of-experts layer chooses each token's experts.

ExpertShare: the experts that a rank has, if ranks divide the experts.

Refuses to know: tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    """Functions that turn a router's logits into scores, numbered as in route.c."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"  # over the logits of the chosen experts only


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which each token's experts are chosen and weighted.

    Attributes:
        top_k: number of experts per token.
        scoring: function that turns logits into scores.
        normalize: whether the weights of a token's experts are divided by their sum.
        scale: factor of the weights of a token's experts.
        num_groups: number of equal groups of experts; if more than one, groups are chosen before
            experts (DeepSeek-AI, arXiv:2405.04434).
        top_groups: number of groups from which a token's experts are chosen.
        group_best: a group's score is the sum of this many best scores of its experts.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


MOST_EXPERT_RANKS = 64  # as in experts.c


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts of one of several ranks: rank ``e % size`` has expert ``e``, as ``e // size``.

    Ranks take experts in turns, because a model may choose a token's experts from few groups of
    adjacent experts.

    Attributes:
        rank: index of the rank, from 0.
        size: number of ranks.
    """

    rank: int = 0
    size: int = 1

    def experts(self, num_experts: int) -> range:
        """Return this rank's experts, out of ``num_experts``."""
        return range(self.rank, num_experts, self.size)


ALL_EXPERTS = ExpertShare()
