"""Routing: the rule by which tokens choose experts, as plain values.

Refuses to know: tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    """Functions that turn a router's logits into scores, in the order of route.c."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"  # logits decide the choice


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's rule.

    Attributes:
        top_k: experts per token.
        scoring: function that turns logits into scores.
        normalize: whether the weights of a token's experts are divided by their sum.
        scale: factor of the weights.
        num_groups: equal groups of experts; if more than one, groups are chosen first (DeepSeek-AI,
            arXiv:2405.04434).
        top_groups: groups from which a token's experts are chosen.
        group_best: number of best experts whose scores sum to a group's score.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
