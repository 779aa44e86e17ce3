"""RotaryEmbedding: turns positions into cosines and sines, once per step for all layers.

A step looks up cosines and sines in a table, with one op; computing them would take seven ops, 1 %
of a decode step on a CPU. On a CPU, the table grows when sequences get longer. On a GPU, the
table is complete from the start, because CUDA graphs hold its address. If a table would be too
large, each step computes cosines and sines. Refuses to know: queries, keys, scaling rules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.rope_frequencies import rope_frequencies
from models.rope_config import RopeConfig

LEAST_POSITIONS = 2048  # minimum number of positions in a CPU's table
MAX_TABLE_BYTES = 2**27  # 256k positions of 128 dims in bfloat16


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of one model.

    Args:
        rope: type and scaling of the rotary embedding.
        head_dim: size of one attention head.
        max_model_len: number of positions.
    """

    frequencies: Tensor  # [rotary_dim / 2] float32
    axes: Tensor  # [rotary_dim / 2] int64, each pair's axis; empty: positions have one axis

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int) -> None:
        super().__init__()
        self._num_positions = max_model_len
        self._tables: dict[torch.dtype, Tensor] = {}  # each [2, positions, rotary_dim]
        self._scaling = rope.attention_factor
        self._max_len = rope.max_len
        self.register_buffer("frequencies", rope_frequencies(rope, head_dim), persistent=False)
        axes = torch.tensor(rope.axes, dtype=torch.int64, device="cpu")
        self.register_buffer("axes", axes, persistent=False)

    def forward(
        self, positions: Tensor, max_seq_len: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines of a step.

        Args:
            positions: ``[num_tokens]`` int64, or ``[3, num_tokens]``: frame, row and column.
            max_seq_len: length of the longest sequence in the step, in tokens.
            dtype: dtype of the result; angles are computed in float32.

        Returns:
            ``(cos, sin)``, each ``[num_tokens, rotary_dim]``; both halves of a row are equal.
        """
        assert self._max_len is None or max_seq_len <= self._max_len, (
            f"sequence of {max_seq_len} tokens, but ModelConfig.max_model_len is {self._max_len}"
        )
        if positions.dim() > 1:
            return self._compute(positions[self.axes].T, dtype)
        table = self._table(max_seq_len, positions.device, dtype)
        if table is None:
            return self._compute(positions[:, None], dtype)
        cos, sin = table.index_select(1, positions)  # [2, num_tokens, rotary_dim]
        return cos, sin

    def _table(self, max_seq_len: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the table, ``[2, positions, rotary_dim]``; make a larger one if necessary.

        Returns None if the table would take more than `MAX_TABLE_BYTES`.
        """
        table = self._tables.get(dtype)
        if table is not None and min(max_seq_len, self._num_positions) <= table.shape[1]:
            return table
        size = self._num_positions
        if device.type == "cpu":
            size = min(size, max(LEAST_POSITIONS, 1 << (max_seq_len - 1).bit_length()))
        if 4 * len(self.frequencies) * size * dtype.itemsize > MAX_TABLE_BYTES:
            return None
        # The table must not be an inference tensor, because a later caller may be outside of
        # inference_mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            every = torch.arange(size, device=device)
            table = self._tables[dtype] = torch.stack(self._compute(every[:, None], dtype))
        return table

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute `forward`'s result without a table.

        Args:
            positions: ``[num_tokens, rotary_dim / 2]``, or ``[num_tokens, 1]`` if all pairs rotate
                by the same position.
            dtype: dtype of the result.
        """
        half = positions.float() * self.frequencies  # [num_tokens, rotary_dim / 2]
        angles = torch.cat((half, half), dim=-1)  # [num_tokens, rotary_dim]
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)
