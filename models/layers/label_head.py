"""LabelHead: a classification head, kept as the checkpoint stores it. All ranks have all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LabelHead(nn.Module):
    """Logits of labels. Not an ``nn.Linear``, so that no packer rounds its few numbers."""

    def __init__(self, num_labels: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[n, num_labels]`` of ``[n, hidden_size]``."""
        return functional.linear(hidden, self.weight)
