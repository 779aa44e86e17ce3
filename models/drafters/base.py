"""Interfaces of drafters: networks that draft the next tokens of a target model.

Refuses to know: requests, sampling and verification of drafts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.kv.layers import AnyKV
from models.base import ForwardContext


class HeadsDrafter(Protocol):
    """A drafter whose heads draft several tokens at once from one state of the target model."""

    num_heads: int

    def draft(self, states: Tensor, num_drafts: int) -> Tensor:
        """Turn states after the last norm, ``[n, hidden_size]``, into logits of drafts.

        Returns ``[n, num_drafts, vocab_size]``. The first draft comes after the token that the
        target model itself predicts from the state.
        """
        ...


class LayersDrafter(Protocol):
    """A drafter whose layers draft one token after the other, and keep their own KV.

    Attributes:
        kv_layers: layout of the KV that each layer keeps.
        reads_states: whether the drafter reads the target model's states. If True, the drafter's KV
            at a position is computed from the state at this position and the next token;
            otherwise, from the token at this position.
        state_layers: layers of the target model whose input states are read; empty: the states
            after the last norm are read.
    """

    kv_layers: tuple[AnyKV, ...]
    reads_states: bool
    state_layers: tuple[int, ...]

    def take_states(self, states: Tensor) -> Tensor:
        """Convert states of the target model, ``[n, ...]``, to the input of `compute`."""
        ...

    def compute(self, token_ids: Tensor, states: Tensor | None, context: ForwardContext) -> Tensor:
        """Compute hidden states of tokens, and write the tokens' keys and values into the KV.

        Args:
            token_ids: ``[n]`` int64.
            states: ``[n, width]``: for each token, the state at the position before it: the target
                model's, converted, or this method's earlier result. None if the drafter does
                not read states.
            context: forward context of the drafter's own layers.

        Returns:
            ``[n, width]``, the input of `compute_logits`.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the next tokens' logits from results of `compute`, ``[n, width]``."""
        ...


class GreedyDrafter(Protocol):
    """A drafter that drafts the most probable tokens of one request in one call."""

    def draft_greedily(
        self, token_ids: Tensor, states: Tensor, context: ForwardContext, num_drafts: int
    ) -> list[int]:
        """Compute a request's new tokens, and draft the ``num_drafts`` most probable next ones."""
        ...
