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
        """``[n, hidden_size]``, the model's last states -> ``[n, num_drafts, vocab_size]``.

        The first draft is of the token behind the one that the state itself gives.
        """
        ...


class LayersDrafter(Protocol):
    """Drafts one token after the other, over KV of its own.

    Attributes:
        kv_layers: layout of what each layer keeps of earlier tokens.
        reads_states: whether it reads the model's states. Its KV at a position then belongs to the
            state there and the token behind it; else to the token there.
        state_layers: the model's layers before which states are read; empty: states behind the
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
            states: ``[n, width]``, of the model or of what this returned for the token before;
                None where it reads none.
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
        """Draft ``num_drafts`` tokens: see ``StateDrafter``."""
        ...
