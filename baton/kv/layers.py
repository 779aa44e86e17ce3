"""KV layers: what one layer keeps of earlier tokens: keys and values, a latent, or a state.

A model declares this for each layer (`CausalLM.kv_layers`); KV cache groups, memory and manifest
follow from it. A unit is a block of one group of layers. Knows neither tensors nor how layers share
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from baton.kv.manifest import HandOffRule, KVArray, KVKind


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value per head and token.

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
        """Count the numbers that a layer keeps of each token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def retained_tokens(self) -> int | None:
        """Number of newest tokens whose blocks are kept, the next token included; None: all."""
        return self.sliding_window

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """Return the arrays that a layer keeps in a unit.

        Args:
            block_size: tokens per unit.
            dtype: dtype name of keys and values.
            compute_dtype: dtype name of activations.
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
        shape: axes such as `(channels, kernel - 1)` or `(heads, head_dim, state_size)`; ranks split
            the first axis.
        dtype: name of the dtype; empty: the dtype of activations.
    """

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class StateKV:
    """A state of constant size after the last token, of a convolution or recurrence.

    A unit holds the state after its block's last token. So the state of a full block is final, and
    a sequence continues from the newest state.

    Attributes:
        state: arrays of the state.
        is_replicated: whether every rank has all of it.
        kind, handoff, token_values: as in `PagedKV`. The size does not depend on the number of
            tokens.
        retained_tokens: 2, the next token and the token whose state the next one starts from.
    """

    state: tuple[StateArray, ...]
    is_replicated: bool = False
    kind: ClassVar = KVKind.STATE
    handoff: ClassVar = HandOffRule.AT_BOUNDARY
    token_values: ClassVar[int] = 0
    retained_tokens: ClassVar[int | None] = 2

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """Implement `PagedKV.arrays`; the size does not depend on the number of tokens."""
        axis = None if self.is_replicated else 0
        return tuple(
            KVArray(shape=one.shape, dtype=one.dtype or compute_dtype, shard_axis=axis)
            for one in self.state
        )


LayerKV = PagedKV | LatentKV | StateKV


def as_replicated(kv: LayerKV) -> LayerKV:
    """Return a copy of a layer's KV that every rank keeps whole."""
    return kv if isinstance(kv, LatentKV) else replace(kv, is_replicated=True)
