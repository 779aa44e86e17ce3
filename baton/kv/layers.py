"""KV layers: what a layer keeps of earlier tokens: keys and values, a latent vector, or a state.

A model declares for each layer what it keeps (`CausalLM.kv_layers`). KV cache groups, the size of
the cache and the manifest follow from these declarations. A unit is a block of one group of layers.
Knows neither tensors nor how layers share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from baton.kv.manifest import HandOffRule, KVArray, KVKind


@dataclass(frozen=True, slots=True)
class PagedKV:
    """KV of an attention layer: a key and a value per head and token.

    Attributes:
        sliding_window: tokens that a token attends to, the token itself included; None: all.
        is_replicated: whether every rank has all heads.
        handoff: when a unit may be transferred.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    is_replicated: bool = False
    handoff: ClassVar = HandOffRule.AS_IT_FILLS

    @property
    def kind(self) -> KVKind:
        """Kind of content in the units of these layers."""
        return KVKind.PAGED if self.sliding_window is None else KVKind.WINDOW

    @property
    def token_values(self) -> int:
        """Return how many values a layer keeps of each token, over all heads."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def retained_tokens(self) -> int | None:
        """Number of newest tokens whose blocks are kept, the next token included; None: all."""
        return self.sliding_window

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """Return the arrays that a layer keeps in a unit, with shapes over all ranks together.

        Args:
            block_size: tokens per unit.
            dtype: name of the dtype of keys and values.
            compute_dtype: name of the dtype of activations, for arrays of a state.
        """
        shape = (2, self.num_kv_heads, block_size, self.head_dim)
        axis = None if self.is_replicated else 1
        return (KVArray(shape=shape, dtype=dtype, shard_axis=axis),)


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One vector per token, from which keys and values of all heads are made (MLA, 2405.04434).

    Attributes:
        width: size of the vector, including the positional part.
        kind, handoff, retained_tokens: as in `PagedKV`.
    """

    width: int
    kind: ClassVar = KVKind.LATENT
    handoff: ClassVar = HandOffRule.AS_IT_FILLS
    retained_tokens: ClassVar[int | None] = None

    @property
    def token_values(self) -> int:
        """Implement `PagedKV.token_values`."""
        return self.width

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """Implement `PagedKV.arrays`; every rank has the whole vector."""
        return (KVArray(shape=(block_size, self.width), dtype=dtype),)


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's state.

    Attributes:
        shape: size of each axis, such as `(channels, kernel - 1)` or `(heads, head_dim,
            state_size)`; ranks split the first axis.
        dtype: name of the dtype; empty: the dtype of activations.
    """

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class StateKV:
    """State of a convolution or recurrence: its size does not depend on the number of tokens.

    A unit holds the state after the last token of its block. So the state in a full block no longer
    changes, and a sequence continues from the state in its newest block.

    Attributes:
        state: arrays of the state.
        is_replicated: whether every rank has the whole state.
        kind, handoff, token_values: as in `PagedKV`. The size does not depend on the number of
            tokens.
        retained_tokens: 2: the next token, and the token before it, because the next token starts
            from the state after that token.
    """

    state: tuple[StateArray, ...]
    is_replicated: bool = False
    kind: ClassVar = KVKind.STATE
    handoff: ClassVar = HandOffRule.AT_BOUNDARY
    token_values: ClassVar[int] = 0
    retained_tokens: ClassVar[int | None] = 2

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """Implement `PagedKV.arrays`; the arrays' size does not depend on ``block_size``."""
        axis = None if self.is_replicated else 0
        return tuple(
            KVArray(shape=one.shape, dtype=one.dtype or compute_dtype, shard_axis=axis)
            for one in self.state
        )


@dataclass(frozen=True, slots=True)
class SharedKV:
    """Declaration of an attention layer that keeps nothing: it reads an earlier layer's KV.

    Attributes:
        distance: number of layers from the earlier layer to this layer.
        token_values: as in `PagedKV`.
    """

    distance: int
    token_values: ClassVar[int] = 0


LayerKV = PagedKV | LatentKV | StateKV
AnyKV = LayerKV | SharedKV


def as_replicated(kv: AnyKV) -> AnyKV:
    """Return a layer's declaration, changed so that every rank keeps all of the layer's KV."""
    return kv if isinstance(kv, LatentKV | SharedKV) else replace(kv, is_replicated=True)


def shared_layers(kv_layers: Sequence[AnyKV]) -> dict[int, int]:
    """Return, for each layer that reads an earlier layer's KV, the index of the earlier layer."""
    kinds = enumerate(kv_layers)
    return {layer: layer - kv.distance for layer, kv in kinds if isinstance(kv, SharedKV)}
