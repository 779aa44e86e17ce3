"""Drafters: networks that draft a model's next tokens, by heads, or by layers with KV.

Refuses to know: requests, sampling and verification of drafts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton.kv.layers import LayerKV
from models.base import ForwardContext


class HeadsDrafter(Protocol):
    """Drafts several tokens at once from one state of the target model."""

    num_heads: int

    def draft(self, states: Tensor, num_drafts: int) -> Tensor:
        """Turn ``[n, hidden_size]`` last states into logits ``[n, num_drafts, vocab_size]``.

        The first draft follows the token that the target model predicts from the state.
        """
        ...


class LayersDrafter(Protocol):
    """Drafts one token after the other, and has its own KV.

    Attributes:
        kv_layers: layout of the KV that each layer keeps.
        reads_states: whether the drafter reads the target model's states. If True, the KV at a
            position depends on the state there and on the next token; otherwise, on the token
            there.
        state_layers: target layers whose input states are read; empty: states after the last norm.
    """

    kv_layers: tuple[LayerKV, ...]
    reads_states: bool
    state_layers: tuple[int, ...]

    def take_states(self, states: Tensor) -> Tensor:
        """Convert the target's states ``[n, ...]`` to the input ``[n, width]`` of `compute`."""
        ...

    def compute(self, token_ids: Tensor, states: Tensor | None, context: ForwardContext) -> Tensor:
        """Compute tokens, and write their keys and values into the drafter's KV.

        Args:
            token_ids: ``[n]`` int64.
            states: ``[n, width]``, converted states, or this method's results for the previous
                tokens; None if the drafter does not read states.
            context: forward context of the drafter's own layers.

        Returns:
            ``[n, width]``.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of the next token from `compute`'s results, ``[n, width]``."""
        ...


class GreedyDrafter(Protocol):
    """Drafts the most probable tokens of one request in one call."""

    def draft_greedily(
        self, token_ids: Tensor, states: Tensor, context: ForwardContext, num_drafts: int
    ) -> list[int]:
        """Draft ``num_drafts`` tokens; see ``StateDrafter.draft_greedily``."""
        ...
