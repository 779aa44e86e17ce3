"""What one layer of a model keeps of the tokens before: keys and values, a latent, or a state.

A model says it of each layer (`CausalLM.kv_layers`); KV cache groups, memory and manifest follow
from it. Refuses to know: tensors, how layers share memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.kv_manifest import HandOffRule, KVArray, KVKind


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value per head and token.

    Attributes:
        sliding_window: tokens, itself included, that a token looks back at; None: all of them.
        is_replicated: of several ranks each has all heads.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    is_replicated: bool = False

    @property
    def kind(self) -> KVKind:
        """What a unit of such layers is."""
        return KVKind.PAGED if self.sliding_window is None else KVKind.WINDOW

    @property
    def handoff(self) -> HandOffRule:
        """When a unit may travel."""
        return HandOffRule.AS_IT_FILLS

    @property
    def retained_tokens(self) -> int | None:
        """Newest tokens whose blocks are kept, the next one included; None: all."""
        return self.sliding_window

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """What it keeps in a unit.

        Args:
            block_size: tokens of a unit.
            dtype: of keys and values, by name.
            compute_dtype: of activations.
        """
        shape = (2, self.num_kv_heads, block_size, self.head_dim)
        axis = None if self.is_replicated else 1
        return (KVArray(shape=shape, dtype=dtype, shard_axis=axis),)


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One vector per token, of which all heads' keys and values are made (MLA, arXiv:2405.04434).

    Attributes:
        width: numbers of the vector, those that carry the position included.
    """

    width: int

    @property
    def kind(self) -> KVKind:
        """See `PagedKV`."""
        return KVKind.LATENT

    @property
    def handoff(self) -> HandOffRule:
        """See `PagedKV`."""
        return HandOffRule.AS_IT_FILLS

    @property
    def retained_tokens(self) -> int | None:
        """See `PagedKV`."""
        return None

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """See `PagedKV`; every rank has the whole vector."""
        return (KVArray(shape=(block_size, self.width), dtype=dtype),)


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's state.

    Attributes:
        shape: such as `(channels, kernel - 1)` or `(heads, head_dim, state_size)`; ranks divide the
            first axis.
        dtype: name of the dtype; empty: that of activations.
    """

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class StateKV:
    """A state behind the last token, of a size that does not grow: convolutions, recurrences.

    A unit holds what was behind the last of its block's tokens; so a full block's is never written
    again, and a sequence goes on from the newest.

    Attributes:
        state: its arrays.
        is_replicated: of several ranks each has all of it.
    """

    state: tuple[StateArray, ...]
    is_replicated: bool = False

    @property
    def kind(self) -> KVKind:
        """See `PagedKV`."""
        return KVKind.STATE

    @property
    def handoff(self) -> HandOffRule:
        """See `PagedKV`."""
        return HandOffRule.AT_BOUNDARY

    @property
    def retained_tokens(self) -> int | None:
        """See `PagedKV`: the next token, and the one whose state it begins with."""
        return 2

    def arrays(self, block_size: int, dtype: str, compute_dtype: str) -> tuple[KVArray, ...]:
        """See `PagedKV`; as large for any number of tokens."""
        axis = None if self.is_replicated else 0
        return tuple(
            KVArray(shape=one.shape, dtype=one.dtype or compute_dtype, shard_axis=axis)
            for one in self.state
        )


LayerKV = PagedKV | LatentKV | StateKV


def as_replicated(kv: LayerKV) -> LayerKV:
    """Return a copy of which every rank keeps the whole."""
    return kv if isinstance(kv, LatentKV) else replace(kv, is_replicated=True)
