"""Gemma 3's vision encoder: SigLIP over an image of fixed size, then averages of patches.

::

    pixels [3, side, side] -> patches [n, hidden] -> SigLIP -> averages of k x k neighbours
    [n / k^2, hidden] -> norm -> product [n / k^2, text size]

Gemma Team, arXiv:2503.19786. Refuses to know: the text network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.layers.norm import RMSNorm
from models.recipe import NormWeight
from models.vision.layers import PatchEmbedding, VisionEncoder, cut_patches
from models.vision.siglip_tiles import siglip_layers
from models.vision.specs import GemmaSpec


class GemmaEncoder(VisionEncoder):
    """The vision part of Gemma 3.

    Args:
        spec: sizes of the encoder.
        text_size: size of the text network's embeddings.
    """

    ignored = ("vision_tower.head.",)

    def __init__(self, spec: GemmaSpec, text_size: int) -> None:
        super().__init__()
        self.width = text_size
        self.vision_tower = _SiglipTransformer(spec)
        self.multi_modal_projector = _Projector(spec, text_size)

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image, whose ``pixel_values`` are ``[3, side, side]``."""
        x, sides = self.vision_tower(pixels["pixel_values"][None])
        embeddings: Tensor = self.multi_modal_projector(x, sides)
        return embeddings


class _SiglipTransformer(nn.Module):
    def __init__(self, spec: GemmaSpec) -> None:
        super().__init__()
        self.embeddings = _Embeddings(spec)
        self.encoder = siglip_layers(spec.layers)
        self.post_layernorm = nn.LayerNorm(spec.layers.hidden_size, eps=spec.layers.norm_eps)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map an image ``[1, 3, side, side]`` to patches ``[rows * columns, hidden_size]``.

        Also returns ``(rows, columns)``.
        """
        x, sides = self.embeddings(images)
        return self.post_layernorm(self.encoder(x, ((1, len(x)),))), sides


class _Embeddings(nn.Module):
    """The first layer: the embedding of each patch, plus its learned position."""

    def __init__(self, spec: GemmaSpec) -> None:
        super().__init__()
        size, self._patch_size = spec.layers.hidden_size, spec.patch_size
        kernel = (spec.num_channels, spec.patch_size, spec.patch_size)
        self.patch_embedding = PatchEmbedding(size, kernel, bias=True)
        self.position_embedding = nn.Embedding(spec.patches_per_side**2, size)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map an image ``[1, 3, side, side]`` to patches ``[rows * columns, hidden_size]``.

        Also returns ``(rows, columns)``.
        """
        patches, sides = cut_patches(images, self._patch_size)
        return self.patch_embedding(patches) + self.position_embedding.weight, sides


class _Projector(nn.Module):
    """The last layers: average each square of patches, and map to the text model's size."""

    def __init__(self, spec: GemmaSpec, text_size: int) -> None:
        super().__init__()
        size = spec.layers.hidden_size
        self._square = spec.patches_per_side // spec.tokens_per_side
        self.mm_input_projection_weight = nn.Parameter(torch.empty(size, text_size))
        self.mm_soft_emb_norm = RMSNorm(size, spec.layers.norm_eps, NormWeight.OFFSET)

    def forward(self, x: Tensor, sides: tuple[int, int]) -> Tensor:
        """Map patches ``[rows * columns, hidden_size]`` to embeddings ``[tokens, text_size]``."""
        square, (rows, columns) = self._square, (side // self._square for side in sides)
        cut = x.view(*sides, -1)[: rows * square, : columns * square]
        cut = cut.reshape(rows, square, columns, square, x.shape[1])
        pooled = cut.mean(dim=(1, 3)).flatten(0, 1)  # [tokens, hidden_size]
        normed: Tensor = self.mm_soft_emb_norm(pooled)
        return normed @ self.mm_input_projection_weight
