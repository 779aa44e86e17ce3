"""AdaptedLatents: a projection of latents to keys and values, with LoRA adapters.

The base model never computes keys and values: it multiplies the query by the key matrix, and the
weighted sum of latents by the value matrix (`models/layers/latent_attention.py`). An adapter A, B
of this projection adds to both products:

    key matrix of a head     K + Bk A    query K  ->  query K + (query Bk) A     Bk, Bv: rows of B
    value matrix of a head   V + Bv A    V sum    ->  V sum + Bv (A sum)

Refuses to know: files, which rows of a step belong to which request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import baton_kernels as ops
from baton.adapters.digest import AdapterDigest
from baton.adapters.modules import AdapterFiles
from baton_kernels import PackedWeight
from models.adapters.low_rank import Piece, gains_of, pack_matrix, refuse_large
from models.adapters.step import StepSpans
from models.adapters.targets import TargetPart
from models.layers.latent_attention import LatentProjection, PackedLatentProjection
from models.recipe import LatentSpec


@dataclass(frozen=True, slots=True, eq=False)
class LatentLowRank:
    """One adapter's matrices for the projection of one layer.

    Attributes:
        down, up: A, and the transpose of A.
        keys, values: the rows of B for keys and for values; each head is padded to whole panels.
        gains: DoRA's factors of the base model's keys and of its values, ``[num_heads, dim]`` each;
            None: no DoRA.
    """

    down: PackedWeight
    up: PackedWeight
    keys: PackedWeight
    values: PackedWeight
    gains: tuple[Tensor, Tensor] | None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that all matrices and gains take."""
        packed = (self.down, self.up, self.keys, self.values)
        tensors = [*(one.panels for one in packed), *(self.gains or ())]
        return sum(one.numel() * one.itemsize for one in tensors)

    def absorb(self, query: Tensor) -> Tensor:
        """Return what the adapter adds to the base model's product of ``query`` and key matrix.

        Args:
            query: ``[n, num_heads, key_dim]``.

        Returns:
            ``[n, num_heads, latent]``.
        """
        inner = query.new_empty(*query.shape[:2], self.down.out_features)
        ops.grouped_packed_linear(query, self.keys, inner)
        return ops.packed_linear(inner.flatten(0, 1), self.up).view(*query.shape[:2], -1)

    def expand(self, attended: Tensor, value_dim: int) -> Tensor:
        """Return what the adapter adds to the base model's product of latents and value matrix.

        Args:
            attended: ``[n, num_heads, latent]``, weighted sums of latents.
            value_dim: size of a value head.

        Returns:
            ``[n, num_heads, value_dim]``.
        """
        inner = ops.packed_linear(attended.flatten(0, 1).contiguous(), self.down)
        out = attended.new_empty(*attended.shape[:2], value_dim)
        ops.grouped_packed_linear(inner.view(*attended.shape[:2], -1), self.values, out)
        return out


class AdaptedLatents(nn.Module):
    """The projection of latents to keys and values in one layer, with adapters.

    Args:
        layer: the base model's projection.
        spec: shape of the attention layer.
        step: tells which tokens have which adapter.

    Attributes:
        layer: the argument, unchanged.
        loaded: matrices of the loaded adapters, by adapter digest.
    """

    def __init__(
        self, layer: LatentProjection | PackedLatentProjection, spec: LatentSpec, step: StepSpans
    ) -> None:
        super().__init__()
        self.layer = layer
        self.loaded: dict[AdapterDigest, LatentLowRank] = {}
        self._spec, self._step = spec, step

    def absorb(self, query: Tensor, out: Tensor) -> None:
        """Multiply queries by the key matrices, with adapters."""
        found = self._step.found(self.loaded)
        scaled = query
        for rows, part in found:
            if part.gains is not None:
                scaled = query.clone() if scaled is query else scaled
                scaled[rows] *= part.gains[0]
        self.layer.absorb(scaled, out)
        for rows, part in found:
            out[rows] += part.absorb(query[rows])

    def expand(self, attended: Tensor, out: Tensor) -> None:
        """Multiply sums of latents by the value matrices, with adapters."""
        self.layer.expand(attended, out)
        for rows, part in self._step.found(self.loaded):
            if part.gains is not None:
                out[rows] *= part.gains[1]
            out[rows] += part.expand(attended[rows], out.shape[2])

    def make(
        self, files: AdapterFiles, pieces: Sequence[Piece], dtype: torch.dtype, width: int
    ) -> LatentLowRank:
        """Pack one adapter's matrices for this projection; raises AdapterError."""
        (piece,) = pieces
        factors, ((part, up, norms),) = piece.factors, piece.rows()
        spec, nope = self._spec, self._spec.qk_nope_head_dim
        sizes = (-1, nope + spec.v_head_dim)  # number and size of this rank's heads
        gains: tuple[Tensor, Tensor] | None = None
        if norms is not None:
            every = gains_of(files, factors, norms, part)
            up = up * every.unsqueeze(1)
            by_head = every.to(dtype).view(sizes)
            gains = by_head[:, :nope], by_head[:, nope:]
        refuse_large(files, factors, dtype, factors.a, up)
        heads = up.view(*sizes, len(factors.a))  # [num_heads, key_dim + value_dim, rank]
        keys, values = heads[:, :nope].transpose(1, 2), heads[:, nope:]
        return LatentLowRank(
            down=pack_matrix(factors.a, dtype, width),
            up=pack_matrix(factors.a.t().contiguous(), dtype, width),
            keys=pack_matrix(_padded(keys, width), dtype, width),
            values=pack_matrix(_padded(values, width), dtype, width),
            gains=gains,
        )

    def squares(self, part: TargetPart, up: Tensor, down: Tensor) -> Tensor:
        """Return, for each row of a part, the squared norm of base weight + adapter."""
        return (_weight(self.layer, self._spec, len(up)) + up @ down).square().sum(dim=1)


def _padded(heads: Tensor, width: int) -> Tensor:
    """Pad each head to whole panels, and join ``[num_heads, outputs, inputs]`` to one matrix."""
    return functional.pad(heads, (0, 0, 0, -heads.shape[1] % width)).flatten(0, 1).contiguous()


def _weight(layer: nn.Module, spec: LatentSpec, num_rows: int) -> Tensor:
    """Return the base weight: ``[num_heads * (key_dim + value_dim), latent]`` float32."""
    if isinstance(layer, LatentProjection):
        return layer.weight.detach().float()
    assert isinstance(layer, PackedLatentProjection)
    num_heads = num_rows // (spec.qk_nope_head_dim + spec.v_head_dim)
    keys, values = (one.unpacked().view(num_heads, -1, one.in_features) for one in layer.packed)
    keys = keys[:, : spec.kv_lora_rank].transpose(1, 2)
    return torch.cat([keys, values[:, : spec.v_head_dim]], dim=1).flatten(0, 1)
