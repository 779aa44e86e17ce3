"""What a network is given for one step, and what the engine may ask of it.

Refuses to know: how a network is built or loaded, who fills the KV cache's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from models.config import ModelConfig

# Cosines and sines of a step, each [num_tokens, rotary_dim], by each rotary embedding of the model.
Rotations = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything but the token ids that one forward pass depends on; an argument, never ambient."""

    positions: Tensor  # [num_tokens] int64, of each token in its sequence
    groups: tuple[tuple[AttentionMetadata, AttentionBackend], ...]  # of each KV cache group;
    # the backend's plan() has seen the metadata
    layer_groups: tuple[int, ...]  # of each layer: its group
    layer_caches: tuple[Tensor, ...]  # each [num_blocks, 2, num_kv_heads, block_size, head_dim]
    after_layer: Callable[[int], None] | None = None  # called after each layer

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest request; groups share lengths."""
        return self.groups[0][0].max_seq_len

    def layer(self, layer_index: int) -> tuple[AttentionMetadata, AttentionBackend, Tensor]:
        """Return the step of one layer: metadata, the backend that planned it, and its cache."""
        attention, backend = self.groups[self.layer_groups[layer_index]]
        return attention, backend, self.layer_caches[layer_index]


class StateContext(Protocol):
    """What a layer with a state is told about a step."""

    def state_layer(self, layer_index: int) -> tuple[StateMetadata, tuple[Tensor, ...]]:
        """Return a layer's metadata, and the arrays of its state, each ``[num_slots, ...]``."""
        ...


class CausalLM(Protocol):
    """A decoder-only language model over a paged KV cache. Used by one thread at a time."""

    @property
    def config(self) -> ModelConfig:
        """What the model was built from."""
        ...

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Tokens, itself included, that a token looks back at in each layer; None: all of them."""
        ...

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """What each layer's keys and values in a cache of float8 are multiplied with."""
        ...

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, and write its keys and values into the cache.

        Args:
            input_ids: ``[num_tokens]`` int64 or int32.
            context: the step; ``context.after_layer(i)`` is called once per layer, in order, when
                layer ``i`` has been computed (on a GPU: launched).

        Returns:
            ``[num_tokens, hidden_size]``, after the last norm.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` rows of ``forward``'s result -> ``[n, vocab_size]``, same dtype."""
        ...
