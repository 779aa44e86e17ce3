"""Embeddings: per-layer embeddings (Gemma 4), and embeddings that a CPU keeps in few bits.

Refuses to know: other packed layers, files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from models.layers.computing import Computing
from models.layers.linear import keep_elements
from models.layers.norm import RMSNorm
from models.parallel.group import SINGLE_RANK, Collective
from models.parallel.shards import Rank, Span
from models.recipe import PerLayerEmbeddingSpec


class PackedEmbedding(Computing):
    """A tied embedding that reads rows from the output head's packed weight, the only copy.

    Args:
        weight: the output head's packed weight.
        dtype: dtype of the embeddings that `forward` returns.
    """

    def __init__(self, weight: ops.PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self._packed, self._dtype = weight, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[num_tokens]`` to embeddings ``[num_tokens, hidden_size]``."""
        return self.ops.unpack_rows(self._packed, input_ids, self._dtype)


class NarrowEmbedding(nn.Module):
    """An embedding with fewer bits per weight than the model's dtype.

    Args:
        weight: ``[vocab_size, hidden_size]``.
        dtype: dtype of the embeddings that `forward` returns.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[num_tokens]`` to embeddings ``[num_tokens, hidden_size]``."""
        return functional.embedding(input_ids, self.weight).to(self._dtype)


def look_up(table: nn.Module, token_ids: Tensor, span: Span, group: Collective) -> Tensor:
    """Return rows of a table that ranks divide by token; ranks sum their results.

    Args:
        table: this rank's rows.
        token_ids: ``[num_tokens]``.
        span: the tokens whose rows this rank has.
        group: the ranks that divide the table.
    """
    if group.size == 1:
        found: Tensor = table(token_ids)
        return found
    is_other = (token_ids < span[0]) | (token_ids >= span[1])
    own = table((token_ids - span[0]).masked_fill(is_other, 0))
    return group.all_reduce(own.masked_fill(is_other[:, None], 0))


@functools.cache
def rounded(number: float, dtype: torch.dtype) -> float:
    """Round an embedding's factor to the embedding's dtype, as Hugging Face does."""
    return float(torch.tensor(number, dtype=dtype, device="cpu"))


class PerLayerEmbedding(nn.Module):
    """Makes each token's vectors for all layers, from its id and its embedding (Gemma 4).

    Args:
        spec: sizes and options.
        vocab_size: number of tokens.
        hidden_size: size of the residual stream.
        num_layers: number of layers.
        norm: norm of a vector.
    """

    def __init__(
        self,
        spec: PerLayerEmbeddingSpec,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        norm: RMSNorm,
    ) -> None:
        super().__init__()
        width = num_layers * spec.size
        self.embed_tokens_per_layer: nn.Module = nn.Embedding(vocab_size, width)
        self.per_layer_model_projection: nn.Module = nn.Linear(hidden_size, width, bias=False)
        self.per_layer_projection_norm = norm
        self._spec, self._factor = spec, hidden_size**-0.5
        self._span: Span = (0, vocab_size)
        self._group: Collective = SINGLE_RANK

    def shard(self, group: Collective) -> None:
        """Keep this rank's tokens of the table; call before weights are loaded."""
        self._span = Rank(group.rank, group.size).span(self._span[1])
        keep_elements(self.embed_tokens_per_layer, "weight", self._span)
        self._group = group

    def forward(self, token_ids: Tensor, embedded: Tensor, images: Sequence[Tensor]) -> Tensor:
        """Return the vectors of a step's tokens, ``[num_tokens, num_layers * size]``.

        Args:
            token_ids: ``[num_tokens]``.
            embedded: ``[num_tokens, hidden_size]``, embeddings of the tokens and of images.
            images: indices of the tokens whose embeddings come from images.
        """
        for places in images:
            token_ids = token_ids.index_fill(0, places, self._spec.image_token_id)
        found = look_up(self.embed_tokens_per_layer, token_ids, self._span, self._group)
        found = found * rounded(self._spec.size**0.5, found.dtype)
        projected = self.per_layer_model_projection(embedded) * self._factor
        by_layer = projected.view(len(token_ids), -1, self._spec.size)
        normed: Tensor = self.per_layer_projection_norm(by_layer)
        return (normed.view(found.shape) + found) * math.sqrt(0.5)


class LayerEnd(Computing):
    """The end of a layer: adds a token's vector for this layer, and scales the residual stream.

    Args:
        spec: sizes and options of per-layer embeddings; None: no vectors are added.
        hidden_size: size of the residual stream.
        norm: norm of what is added.
        has_scalar: whether the stream is multiplied by a number of the checkpoint.
    """

    def __init__(
        self,
        spec: PerLayerEmbeddingSpec | None,
        hidden_size: int,
        norm: RMSNorm,
        *,
        has_scalar: bool,
    ) -> None:
        super().__init__()
        self._spec = spec
        if spec is not None:
            self.per_layer_input_gate: nn.Module = nn.Linear(hidden_size, spec.size, bias=False)
            self.per_layer_projection: nn.Module = nn.Linear(spec.size, hidden_size, bias=False)
            self.post_per_layer_input_norm = norm
        self.layer_scalar = nn.Parameter(torch.empty(1)) if has_scalar else None
        self._factor = 1.0

    def keep_loaded(self, scalar: Tensor) -> Tensor:
        """Keep a checkpoint's layer scalar, ``[1]``, as a number, too."""
        self._factor = float(scalar)
        return scalar

    def forward(self, x: Tensor, residual: Tensor, factor: float, vectors: Tensor | None) -> Tensor:
        """Add the layer's last result, ``x * factor``, and the tokens' vectors to the stream.

        Args:
            x: ``[num_tokens, hidden_size]``.
            residual: ``[num_tokens, hidden_size]``, the stream; not changed.
            factor: factor of ``x``.
            vectors: ``[num_tokens, size]``, the tokens' vectors for this layer, if there are any.
        """
        if self._spec is None:
            return self.ops.scaled_add(x, residual, factor, self._factor)
        assert vectors is not None, "the model has per-layer embeddings"
        stream = self.ops.scaled_add(x, residual, factor)
        gates = self.per_layer_input_gate(stream)
        gated = self.ops.gate_mul(gates, vectors, self._spec.activation)
        added = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return self.ops.scaled_add(added, stream, 1.0, self._factor)
