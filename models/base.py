"""The inputs of a model for one step, and the interface of models.

Refuses to know: how a network is built or loaded, who allocates KV blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.kv.layers import AnyKV
from baton_kernels.attention.base import AttentionBackend, AttentionMetadata
from baton_kernels.state_metadata import StateMetadata
from models.config import ModelConfig

# For each rotary embedding of the model: the cosines and sines of a step's positions, each
# [num_tokens, rotary_dim].
Rotations = tuple[tuple[Tensor, Tensor], ...]


# A layer's cache: one tensor [num_blocks, ...] for attention, or one tensor [num_slots, ...] for
# each array of a recurrent state.
LayerCache = Tensor | tuple[Tensor, ...]
AttentionStep = tuple[AttentionMetadata, AttentionBackend]
GroupStep = AttentionStep | tuple[StateMetadata, None]


class AdapterSpan(NamedTuple):
    """The adjacent tokens of a step that use one adapter.

    Attributes:
        adapter: the adapter's digest.
        first, end: index of the first token in the step, and the index after the last token.
    """

    adapter: str
    first: int
    end: int


class ImageRows(NamedTuple):
    """The tokens of a step whose embeddings come from one image's encoding.

    Attributes:
        places: ``[n]`` int64, indices of the tokens in the step.
        embeddings: ``[n, width]``: the tokens' embeddings; with DeepStack, each is followed by the
            vectors to add to the residual stream after each of the first layers.
    """

    places: Tensor
    embeddings: Tensor


class ImageEncoder(Protocol):
    """A model's vision encoder: turns an image's pixels into embeddings."""

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return an image's embeddings, ``[num_placeholders, width]``.

        Args:
            pixels: arrays that the model's image processor returned for the image, by name.
        """
        ...


def spans_of_rows(spans: tuple[AdapterSpan, ...], rows: Sequence[int]) -> tuple[AdapterSpan, ...]:
    """Return which of the step's tokens in ``rows`` use which adapter, as indices into ``rows``.

    Args:
        spans: the step's spans.
        rows: indices of the tokens in the step, ascending.
    """
    moved = (
        AdapterSpan(span.adapter, bisect_left(rows, span.first), bisect_left(rows, span.end))
        for span in spans
    )
    return tuple(span for span in moved if span.first < span.end)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """All inputs of one forward pass except token ids."""

    # [num_tokens] int64, each token's position for RoPE; with three axes, [3, num_tokens]: frame,
    # row and column
    positions: Tensor
    # For each KV cache group, its metadata and the attention backend that planned the step; a group
    # of recurrent states has no backend. The first group has attention.
    groups: tuple[GroupStep, ...]
    layer_groups: tuple[int, ...]  # index into `groups`, per layer
    layer_caches: tuple[LayerCache, ...]  # one per layer
    after_layer: Callable[[int], None] | None = None  # called with each computed layer's index
    adapters: tuple[AdapterSpan, ...] = ()  # ascending; tokens outside of all spans have no adapter
    images: tuple[ImageRows, ...] = ()  # images whose tokens are in this step

    @property
    def max_seq_len(self) -> int:
        """Return the number of tokens of the longest request in the step."""
        metadata = self.groups[0][0]
        assert isinstance(metadata, AttentionMetadata)
        return metadata.max_seq_len

    def layer(self, layer_index: int) -> tuple[AttentionMetadata, AttentionBackend, Tensor]:
        """Return an attention layer's metadata, the backend that planned the step, and the cache.

        The cache is ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, or ``[num_blocks,
        block_size, width]`` for latents.
        """
        attention, backend = self.groups[self.layer_groups[layer_index]]
        cache = self.layer_caches[layer_index]
        assert backend is not None
        assert isinstance(attention, AttentionMetadata)
        assert isinstance(cache, Tensor)
        return attention, backend, cache

    def state_layer(self, layer_index: int) -> tuple[StateMetadata, tuple[Tensor, ...]]:
        """Return the metadata of a layer with a recurrent state, and the state's arrays.

        Each array is ``[num_slots, ...]``.
        """
        metadata, _ = self.groups[self.layer_groups[layer_index]]
        cache = self.layer_caches[layer_index]
        assert isinstance(metadata, StateMetadata)
        assert isinstance(cache, tuple)
        return metadata, cache


class StateContext(Protocol):
    """The part of a step's inputs that layers with a recurrent state read."""

    def state_layer(self, layer_index: int) -> tuple[StateMetadata, tuple[Tensor, ...]]:
        """Return the metadata of a layer with a recurrent state, and the state's arrays.

        Each array is ``[num_slots, ...]``.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only language model over a paged KV cache. Used by one thread at a time."""

    @property
    def config(self) -> ModelConfig:
        """Return the configuration from which the model was built."""
        ...

    @property
    def vision(self) -> ImageEncoder | None:
        """Return the encoder of images; None: the model accepts no images."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes of weights that are mapped from a file of packed weights."""
        ...

    @property
    def kv_layers(self) -> tuple[AnyKV, ...]:
        """Return the layout of each layer's KV cache or recurrent state."""
        ...

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """Return each layer's scales ``(key, value)`` for a float8 KV cache."""
        ...

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, and write the tokens' keys and values into the cache.

        Args:
            input_ids: ``[num_tokens]`` int64 or int32.
            context: the step; ``context.after_layer(i)`` is called once per layer, in order, when
                layer ``i`` has been computed (on a GPU: launched).

        Returns:
            Hidden states after the last norm, ``[num_tokens, hidden_size]``.
        """
        ...

    def compute_logits(self, hidden: Tensor, adapters: tuple[AdapterSpan, ...] = ()) -> Tensor:
        """Return the logits of hidden states: ``[n, vocab_size]``, in the dtype of ``hidden``.

        Args:
            hidden: ``[n, hidden_size]``, after the last norm.
            adapters: the rows of ``hidden`` that use adapters.
        """
        ...

    def compute_labels(self, hidden: Tensor) -> Tensor:
        """Return the classification head's logits, ``[n, num_labels]``, if the model has this head.

        Args:
            hidden: ``[n, hidden_size]``, after the last norm.
        """
        ...
