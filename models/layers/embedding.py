"""The embedding of a model whose head is the same weight (tied), where that is kept packed.

Refuses to know: what else is packed, files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baton_kernels as ops


class PackedEmbedding(nn.Module):
    """Rows out of the head's panels: the numbers are in memory once.

    Args:
        weight: the head's, in a format that keeps numbers.
        dtype: of what is returned.
    """

    def __init__(self, weight: ops.PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self._packed, self._dtype = weight, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[num_tokens]`` -> ``[num_tokens, hidden_size]``."""
        return ops.unpack_rows(self._packed, input_ids).to(self._dtype)
