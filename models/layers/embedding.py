"""Embeddings on a CPU: packed together with the output head if tied, else in 16 bits.

Refuses to know: other packed layers, files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from models.layers.computing import Computing


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
