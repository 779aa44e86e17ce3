"""Positions to cosines and sines, once per step for all layers.

Computed from the positions rather than looked up: a table for a million positions would cost
more memory than the five small ops per step save. Refuses to know: queries, keys, scaling rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.rope_frequencies import rope_frequencies
from models.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of one model.

    Args:
        rope: type and scaling.
        head_dim: size of one attention head.
    """

    frequencies: Tensor  # [rotary_dim / 2] float32

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self._scaling = rope.attention_factor
        self._max_len = rope.max_len
        self.register_buffer("frequencies", rope_frequencies(rope, head_dim), persistent=False)

    def forward(
        self, positions: Tensor, max_seq_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a step.

        Args:
            positions: ``[num_tokens]`` int64.
            max_seq_len: the longest sequence in the step.
            dtype: of the result; the angles are computed in float32.

        Returns:
            ``(cos, sin)``, each ``[num_tokens, rotary_dim]``, both halves alike.
        """
        assert self._max_len is None or max_seq_len <= self._max_len, (
            f"sequence of {max_seq_len} tokens, but ModelConfig.max_model_len is {self._max_len}"
        )
        half = positions.unsqueeze(1).float() * self.frequencies  # [num_tokens, rotary_dim / 2]
        angles = torch.cat((half, half), dim=-1)  # [num_tokens, rotary_dim]
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)
