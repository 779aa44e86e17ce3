"""A small model that drafts for a larger target model with the same vocabulary.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The draft model may have any
architecture without recurrent states, which cannot be rolled back.
"""

from __future__ import annotations

from torch import Tensor

from baton.api.errors import ConfigError, ModelLoadError
from baton.kv.layers import AnyKV, StateKV
from models.base import CausalLM, ForwardContext
from models.drafters.loading import DrafterSource
from models.loading.loader import load_model

# Vocabulary sizes of a family's models may differ by this much, because of padding.
MOST_PADDING = 1024


class DraftModel:
    """A ``LayersDrafter`` that is a small model with the target model's vocabulary.

    Args:
        model: the small model, which drafts.
        vocab_size: vocabulary size of the target model.
    """

    reads_states = False
    state_layers: tuple[int, ...] = ()

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self.kv_layers: tuple[AnyKV, ...] = model.kv_layers
        self.max_model_len = model.config.max_model_len

    def take_states(self, states: Tensor) -> Tensor:
        """Return the states unchanged. Never called, because this drafter reads no states."""
        return states

    def compute(self, token_ids: Tensor, states: Tensor | None, context: ForwardContext) -> Tensor:
        """Compute hidden states of tokens, and write KV; see ``LayersDrafter.compute``."""
        # The target's ids may exceed the drafter's vocabulary, which may have less padding.
        if self._model.config.vocab_size < self._vocab_size:
            token_ids = token_ids.clamp(max=self._model.config.vocab_size - 1)
        return self._model.forward(token_ids, context)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute the next tokens' logits; drop token ids beyond the target's vocabulary."""
        return self._model.compute_logits(hidden)[:, : self._vocab_size]


def load_draft_model(source: DrafterSource) -> DraftModel:
    """Load the drafter for ``--speculative-method draft_model``."""
    if not source.where.is_dir():
        raise ModelLoadError(f"{source.where}: no such folder (speculative_model)")
    model = load_model(
        source.where, dtype=source.dtype, device=source.device, packer=source.packer, ops=source.ops
    )
    own, vocab_size = model.config.vocab_size, source.model.config.vocab_size
    if abs(own - vocab_size) > MOST_PADDING:
        raise ConfigError(
            f"speculative_model: its vocabulary has {own} tokens, the model's {vocab_size}; "
            "a draft model needs the same vocabulary"
        )
    if any(isinstance(kv, StateKV) for kv in model.kv_layers):
        raise ConfigError("speculative_model: states of a draft model cannot be rolled back")
    return DraftModel(model, vocab_size)
