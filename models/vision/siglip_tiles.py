"""The vision encoder of Idefics3 and SmolVLM: SigLIP over tiles (arXiv:2408.12637).

The image processor cuts a large image into square tiles, and adds the whole image, scaled to the
size of a tile::

    pixels [tiles, 3, side, side] -> patches [tiles * n, hidden] -> SigLIP within each tile ->
    s x s neighbours joined [tiles * n / s^2, s^2 * hidden] -> product [tiles * n / s^2, text size]

Refuses to know: how many tiles an image has (`baton/media/layouts/tiles.py`), the text network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models.vision.layers import (
    LayerNames,
    Layers,
    PatchEmbedding,
    VisionAttention,
    VisionEncoder,
    VisionLayer,
    VisionMlp,
    cut_patches,
)
from models.vision.specs import TilesSpec, TransformerSpec

_NAMES = LayerNames("layer_norm1", "self_attn", "layer_norm2", "mlp")
_LARGEST_FRACTION = 1.0 - 1e-6


def siglip_layers(spec: TransformerSpec) -> Layers:
    """Make the layers of SigLIP (Zhai et al., arXiv:2303.15343)."""

    def norm() -> nn.Module:
        return nn.LayerNorm(spec.hidden_size, eps=spec.norm_eps)

    return Layers(
        VisionLayer(_NAMES, norm, VisionAttention(spec, "out_proj", bias=True), VisionMlp(spec))
        for _ in range(spec.num_layers)
    )


class TilesEncoder(VisionEncoder):
    """The vision part of Idefics3 and SmolVLM.

    Args:
        spec: sizes of the encoder.
        text_size: size of the text network's embeddings.
    """

    def __init__(self, spec: TilesSpec, text_size: int) -> None:
        super().__init__()
        self.width = text_size
        self.vision_model = _TileTransformer(spec)
        self.connector = _Connector(spec, text_size)

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return an image's embeddings; its ``pixel_values`` are ``[tiles, 3, side, side]``."""
        tiles = pixels["pixel_values"]
        embeddings: Tensor = self.connector(self.vision_model(tiles), len(tiles))
        return embeddings


class _TileTransformer(nn.Module):
    def __init__(self, spec: TilesSpec) -> None:
        super().__init__()
        self.embeddings = _TileEmbeddings(spec)
        self.encoder = siglip_layers(spec.layers)
        self.post_layernorm = nn.LayerNorm(spec.layers.hidden_size, eps=spec.layers.norm_eps)

    def forward(self, tiles: Tensor) -> Tensor:
        """Map ``[tiles, 3, side, side]`` to ``[tiles * patches of a tile, hidden_size]``."""
        x = self.embeddings(tiles)
        runs = ((len(tiles), len(x) // len(tiles)),)
        result: Tensor = self.post_layernorm(self.encoder(x, runs))
        return result


class _TileEmbeddings(nn.Module):
    """The first layer: the embedding of each patch, plus its learned position."""

    def __init__(self, spec: TilesSpec) -> None:
        super().__init__()
        size = spec.layers.hidden_size
        self._patch_size, self._num_positions = spec.patch_size, spec.positions_per_side
        kernel = (spec.num_channels, spec.patch_size, spec.patch_size)
        self.patch_embedding = PatchEmbedding(size, kernel, bias=True)
        self.position_embedding = nn.Embedding(self._num_positions**2, size)

    def forward(self, tiles: Tensor) -> Tensor:
        """Map ``[tiles, 3, side, side]`` to ``[tiles * patches of a tile, hidden_size]``."""
        patches, sides = cut_patches(tiles, self._patch_size)
        embedded = self.patch_embedding(patches)  # [tiles * patches of a tile, hidden_size]
        places = _positions(*sides, self._num_positions).to(embedded.device)
        positions = self.position_embedding(places)  # [patches of a tile, hidden_size]
        result: Tensor = (embedded.unflatten(0, (len(tiles), -1)) + positions).flatten(0, 1)
        return result


@functools.lru_cache(maxsize=64)
def _positions(rows: int, columns: int, per_side: int) -> Tensor:
    """Return the index of each patch's learned position, ``[rows * columns]`` int64.

    The index depends on the patch's relative place in the image (Dehghani et al.,
    arXiv:2307.06304). To round as transformers does, the steps are computed in float32.
    """
    bounds = torch.arange(1 / per_side, 1.0, 1 / per_side, device="cpu")

    def places(count: int) -> Tensor:
        step = 1.0 / torch.tensor(count, device="cpu")
        fractions = torch.arange(count, dtype=torch.float32, device="cpu") * step
        return torch.bucketize(fractions.clamp(max=_LARGEST_FRACTION), bounds, right=True)

    return (places(rows)[:, None] * per_side + places(columns)[None, :]).flatten()


class _Connector(nn.Module):
    """The last layer: joins each square of patches, and maps it to the text network's size."""

    def __init__(self, spec: TilesSpec, text_size: int) -> None:
        super().__init__()
        self._scale = spec.scale
        joined = spec.layers.hidden_size * spec.scale**2
        proj = nn.Linear(joined, text_size, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": proj})

    def forward(self, x: Tensor, num_tiles: int) -> Tensor:
        """Map ``[tiles * n, hidden_size]`` to ``[tiles * n / scale^2, text_size]``."""
        scale, side = self._scale, int((len(x) // num_tiles) ** 0.5)
        cut = x.view(num_tiles, side // scale, scale, side // scale, scale, x.shape[1])
        joined = cut.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(0, 2)
        result: Tensor = self.modality_projection["proj"](joined)
        return result
