"""AdaptedEmbedding: an embedding with LoRA adapters for some tokens.

Refuses to know: how files are read, how the base model stores its embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import baton_kernels as ops
from baton.adapters.digest import AdapterDigest
from baton.adapters.modules import AdapterFiles
from baton_kernels import PackedWeight
from models.adapters.low_rank import Piece, pack_matrix, refuse_large
from models.adapters.step import StepSpans


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLowRank:
    """One adapter's matrices for an embedding.

    Attributes:
        table: ``[vocab_size, rank]``; if ranks divide the vocabulary, only the rows of this rank's
            tokens.
        b: ``[hidden_size, rank]``.
    """

    table: Tensor
    b: PackedWeight

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that the two matrices take."""
        return sum(one.numel() * one.itemsize for one in (self.table, self.b.panels))

    def add_to(self, out: Tensor, input_ids: Tensor) -> None:
        """Add the adapter's product for n tokens to ``out``, ``[n, hidden_size]``, in place."""
        out += ops.packed_linear(self.table[input_ids], self.b)


class AdaptedEmbedding(nn.Module):
    """The base model's embedding, plus the adapters' products for tokens that use an adapter.

    Args:
        layer: the base model's embedding.
        step: tells which tokens have which adapter.

    Attributes:
        layer: the argument, unchanged.
        loaded: matrices of the loaded adapters, by adapter digest.
    """

    def __init__(self, layer: nn.Module, step: StepSpans) -> None:
        super().__init__()
        self.layer = layer
        self.loaded: dict[AdapterDigest, EmbeddingLowRank] = {}
        self._step = step

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map token ids ``[num_tokens]`` to embeddings ``[num_tokens, hidden_size]``."""
        out: Tensor = self.layer(input_ids)
        for rows, part in self._step.found(self.loaded):
            part.add_to(out[rows], input_ids[rows])
        return out

    def make(
        self, files: AdapterFiles, pieces: Sequence[Piece], dtype: torch.dtype, width: int
    ) -> EmbeddingLowRank:
        """Convert an adapter's matrices to ``dtype``.

        Raises:
            AdapterError: a number is too large for ``dtype``.
        """
        (piece,) = pieces
        factors, down = piece.factors, piece.down
        refuse_large(files, factors, dtype, down, factors.b)
        table = down.t().to(dtype).contiguous()
        return EmbeddingLowRank(table, pack_matrix(factors.b, dtype, width))
