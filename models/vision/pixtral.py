"""Pixtral's encoder and Mistral 3's projector: images of any size (arXiv:2410.07073).

::

    pixels [3, height, width] -> patches [rows * columns, hidden] -> layers with rotary positions ->
    squares of neighbours joined -> product [placeholders, hidden] -> two products [.., text size]

In Pixtral, each patch has a placeholder, and no squares are joined.

Refuses to know: how images are resized (`baton/media/layouts/pixtral.py`), the text network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.vision.layers import (
    ACTIVATIONS,
    LayerNames,
    Layers,
    PatchEmbedding,
    Rotation,
    VisionAttention,
    VisionEncoder,
    VisionLayer,
    cut_patches,
    frequencies,
    rotation_by_axes,
)
from models.vision.specs import PixtralSpec, TransformerSpec

_NAMES = LayerNames("attention_norm", "attention", "ffn_norm", "feed_forward")


class PixtralEncoder(VisionEncoder):
    """The vision part of Pixtral and of Mistral 3.

    Args:
        spec: sizes of the encoder.
        text_size: size of the text network's embeddings.
    """

    def __init__(self, spec: PixtralSpec, text_size: int) -> None:
        super().__init__()
        self.width = text_size
        self.vision_tower = _PixtralTransformer(spec)
        self.multi_modal_projector = _Projector(spec, text_size)

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image, whose ``pixel_values`` are ``[3, height, width]``."""
        x, sides = self.vision_tower(pixels["pixel_values"][None])
        embeddings: Tensor = self.multi_modal_projector(x, sides)
        return embeddings


class _PixtralTransformer(nn.Module):
    def __init__(self, spec: PixtralSpec) -> None:
        super().__init__()
        layers = spec.layers
        self._spec = spec
        kernel = (spec.num_channels, spec.patch_size, spec.patch_size)
        self.patch_conv = PatchEmbedding(layers.hidden_size, kernel, bias=False)
        self.ln_pre = RMSNorm(layers.hidden_size, layers.norm_eps)
        self.transformer = Layers(_layer(layers) for _ in range(layers.num_layers))

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map an image ``[1, 3, height, width]`` to patches ``[rows * columns, hidden_size]``."""
        patches, sides = cut_patches(images, self._spec.patch_size)
        x = self.ln_pre(self.patch_conv(patches))
        rotation = self._rotation(*sides, x.device)
        return self.transformer(x, ((1, len(x)),), rotation), sides

    def _rotation(self, rows: int, columns: int, device: torch.device) -> Rotation:
        """Return the rotation of an image's patches.

        Every second frequency, from the first on, rotates by row; the others rotate by column.
        """
        each = frequencies(self._spec.theta, self._spec.layers.head_dim).to(device)
        row = torch.arange(rows, device=device).repeat_interleave(columns)
        column = torch.arange(columns, device=device).repeat(rows)
        return rotation_by_axes(row, column, each[0::2], each[1::2])


def _layer(spec: TransformerSpec) -> VisionLayer:
    return VisionLayer(
        _NAMES,
        lambda: RMSNorm(spec.hidden_size, spec.norm_eps),
        VisionAttention(spec, "o_proj", bias=False),
        GatedMLP(spec.hidden_size, spec.inner_size, bias=False, activation=spec.activation),
    )


class _Projector(nn.Module):
    """The last layers: join each square of patches, and map to the text network's size."""

    def __init__(self, spec: PixtralSpec, text_size: int) -> None:
        super().__init__()
        size, merge, bias = spec.layers.hidden_size, spec.merge, spec.projector_bias
        self._merge, self._activation = merge, ACTIVATIONS[spec.projector_activation]
        self._has_merger = spec.merger_eps is not None
        if spec.merger_eps is not None:
            self.norm = RMSNorm(size, spec.merger_eps)
            merging = nn.Linear(size * merge**2, size, bias=False)
            self.patch_merger = nn.ModuleDict({"merging_layer": merging})
        self.linear_1 = nn.Linear(size, text_size, bias=bias)
        self.linear_2 = nn.Linear(text_size, text_size, bias=bias)

    def forward(self, x: Tensor, sides: tuple[int, int]) -> Tensor:
        """Map patches ``[n, hidden_size]`` to embeddings ``[n / merge^2, text_size]``."""
        merged = self._merged(x, sides) if self._has_merger else x
        result: Tensor = self.linear_2(self._activation(self.linear_1(merged)))
        return result

    def _merged(self, x: Tensor, sides: tuple[int, int]) -> Tensor:
        merge, (rows, columns) = self._merge, (side // self._merge for side in sides)
        x = self.norm(x).view(*sides, -1)[: rows * merge, : columns * merge]
        cut = x.reshape(rows, merge, columns, merge, -1)
        # A joined vector is ordered by feature, then by place in the square, as by torch's unfold.
        joined = cut.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
        result: Tensor = self.patch_merger["merging_layer"](joined)
        return result
