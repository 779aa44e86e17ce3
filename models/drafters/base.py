"""Drafters: networks that draft a model's next tokens, by heads, or by layers with KV.

Refuses to know: requests, how drafts are drawn, who verifies them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.kv.layers import LayerKV
from models.base import ForwardContext


class HeadsDrafter(Protocol):
    """Drafts several tokens at once from one state of the model."""

    num_heads: int

    def draft(self, states: Tensor, num_drafts: int) -> Tensor:
        """``[n, hidden_size]``, the model's last states -> logits ``[n, num_drafts, vocab_size]``.

        The first draft follows the token that the model itself predicts from the state.
        """
        ...


class LayersDrafter(Protocol):
    """Drafts one token after the other, over KV of its own.

    Attributes:
        kv_layers: layout of what each layer keeps of earlier tokens.
        reads_states: whether it reads the model's states. If so, its KV at a position depends on
            the state there and on the next token; otherwise, on the token there.
        state_layers: layers of the model before which states are read; empty: the states after the
            last norm are read.
    """

    kv_layers: tuple[LayerKV, ...]
    reads_states: bool
    state_layers: tuple[int, ...]

    def take_states(self, states: Tensor) -> Tensor:
        """Convert states of the model to the input of `compute`: ``[n, ...]`` -> ``[n, width]``."""
        ...

    def compute(self, token_ids: Tensor, states: Tensor | None, context: ForwardContext) -> Tensor:
        """Compute tokens, and write their keys and values.

        Args:
            token_ids: ``[n]`` int64.
            states: ``[n, width]``, states of the model, or this method's results for the previous
                tokens; None if the drafter reads no states.
            context: forward context of the drafter's own layers.

        Returns:
            ``[n, width]``.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn ``[n, width]`` rows of `compute`'s result into logits of the next token."""
        ...


class GreedyDrafter(Protocol):
    """Drafts the most probable tokens of one request in one call."""

    def draft_greedily(
        self, token_ids: Tensor, states: Tensor, context: ForwardContext, num_drafts: int
    ) -> list[int]:
        """Draft ``num_drafts`` tokens; see ``StateDrafter.draft_greedily``."""
        ...
