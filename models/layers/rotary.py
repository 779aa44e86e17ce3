"""Positions to cosines and sines, once per step for all layers.

On a GPU a step looks them up in a table, which is one kernel in place of seven. Where there is none
they are computed from the positions: on a CPU small ops cost nothing to launch, and a table for a
million positions would take too much memory. Refuses to know: queries, keys, scaling rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.rope_frequencies import rope_frequencies
from models.rope_config import RopeConfig

TABLE_DEVICES = ("cuda",)
MAX_TABLE_BYTES = 2**27  # 256k positions of 128 dims in bfloat16


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of one model.

    Args:
        rope: type and scaling.
        head_dim: size of one attention head.
        max_model_len: positions that there may be.
    """

    frequencies: Tensor  # [rotary_dim / 2] float32

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int) -> None:
        super().__init__()
        self._num_positions = max_model_len
        self._tables: dict[torch.dtype, Tensor] = {}  # each [2, num_positions, rotary_dim]
        self._scaling = rope.attention_factor
        self._max_len = rope.max_len
        self.register_buffer("frequencies", rope_frequencies(rope, head_dim), persistent=False)

    def forward(
        self, positions: Tensor, max_seq_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines of a step.

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
        if not self._has_table(positions.device, dtype):
            return self._compute(positions, dtype)
        if dtype not in self._tables:
            # Not an inference tensor: the next caller may be outside inference_mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                every = torch.arange(self._num_positions, device=positions.device)
                self._tables[dtype] = torch.stack(self._compute(every, dtype))
        cos, sin = self._tables[dtype].index_select(1, positions)  # [2, num_tokens, rotary_dim]
        return cos, sin

    def _has_table(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Say whether there is, or would be, a table of these."""
        num_bytes = 4 * len(self.frequencies) * self._num_positions * dtype.itemsize
        return device.type in TABLE_DEVICES and num_bytes <= MAX_TABLE_BYTES

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`forward` without a table."""
        half = positions.unsqueeze(1).float() * self.frequencies  # [num_tokens, rotary_dim / 2]
        angles = torch.cat((half, half), dim=-1)  # [num_tokens, rotary_dim]
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)
