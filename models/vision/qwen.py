"""Qwen's vision encoders: images of any size, rotary positions; some with windows or DeepStack.

::

    patches [n, pixels of a patch] -> [n, hidden] -> layers -> merger [n / merge^2, text size]
                                              |
                                              +-> mergers of deep layers (DeepStack): their results
                                                  are appended to each embedding

A square of merge x merge patches becomes one embedding, and the image processor returns the patches
square by square. In most layers of Qwen2.5-VL, patches attend only within windows of squares. For
this, the squares are first sorted by window; the embeddings are put back in image order at the end.
Refuses to know: how images are resized (`baton/media/layouts/qwen.py`), the text network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baton.telemetry.round_watch import note_progress
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.vision.layers import (
    ACTIVATIONS,
    LayerNames,
    PatchEmbedding,
    Rotation,
    Runs,
    VisionAttention,
    VisionEncoder,
    VisionLayer,
    VisionMlp,
    frequencies,
    rotation_by_axes,
)
from models.vision.specs import QwenSpec

_NAMES = LayerNames("norm1", "attn", "norm2", "mlp")
_THIRD_MLP = ("linear_fc1", "linear_fc2")


class QwenEncoder(VisionEncoder):
    """The vision part of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

    Args:
        spec: sizes of the encoder.
    """

    def __init__(self, spec: QwenSpec) -> None:
        super().__init__()
        self.width = spec.text_size * (1 + len(spec.deep_layers))
        self.visual = _QwenTransformer(spec)

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image, ``[num_placeholders, width]``.

        ``pixel_values`` are ``[patches, pixels of a patch]``; ``image_grid_thw`` is the number of
        frames, of rows and of columns of patches.
        """
        _, rows, columns = map(int, pixels["image_grid_thw"])
        embeddings: Tensor = self.visual(pixels["pixel_values"], rows, columns)
        return embeddings


class _Places(NamedTuple):
    """The row and the column of each patch of an image, ``[num_patches]`` int64 each."""

    rows: Tensor
    columns: Tensor


class _QwenTransformer(nn.Module):
    def __init__(self, spec: QwenSpec) -> None:
        super().__init__()
        self._spec, size = spec, spec.layers.hidden_size
        kernel = (spec.num_channels, spec.num_frames, spec.patch_size, spec.patch_size)
        proj = PatchEmbedding(size, kernel, bias=spec.is_third)
        self.patch_embed = nn.ModuleDict({"proj": proj})
        if spec.positions_per_side is not None:
            self.pos_embed = nn.Embedding(spec.positions_per_side**2, size)
        self.blocks = nn.ModuleList(_layer(spec) for _ in range(spec.layers.num_layers))
        self.merger = _ThirdMerger(spec) if spec.is_third else _Merger(spec)
        if spec.deep_layers:
            self.deepstack_merger_list = nn.ModuleList(
                _ThirdMerger(spec, is_deep=True) for _ in spec.deep_layers
            )

    def forward(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Return the embeddings of an image of ``rows`` x ``columns`` patches."""
        spec = self._spec
        x = self.patch_embed["proj"](pixels)
        places = _places(rows, columns, spec.merge, x.device)
        if spec.positions_per_side is not None:
            x = x + self._learned(places, rows, columns).to(x.dtype)
        order, windows = None, None
        if spec.window is not None:
            order, windows = _windows(rows // spec.merge, columns // spec.merge, spec)
            order = order.to(x.device)
            x, *sorted_places = (self._sorted(one, order) for one in (x, *places))
            places = _Places(*sorted_places)
        found = self._layers(x, self._rotation(places), windows)
        merged = torch.cat(found, dim=1)
        return merged if order is None else torch.empty_like(merged).index_copy_(0, order, merged)

    def _layers(self, x: Tensor, rotation: Rotation, windows: Runs | None) -> list[Tensor]:
        """Return the merger's result, then the result of each deep layer's merger."""
        spec, deep = self._spec, list[Tensor]()
        everything = ((1, len(x)),)
        for index, layer in enumerate(self.blocks):
            note_progress()  # as in `Layers`
            is_full = windows is None or index in spec.full_layers
            x = layer(x, everything if is_full else windows, rotation)
            if index in spec.deep_layers:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return [self.merger(x), *deep]

    def _sorted(self, x: Tensor, order: Tensor) -> Tensor:
        """Reorder patches, ``[n, ...]``, so that their squares are in the given order."""
        by_square = x.view(len(order), -1, *x.shape[1:])
        return by_square[order].flatten(0, 1)

    def _rotation(self, places: _Places) -> Rotation:
        each = frequencies(self._spec.theta, self._spec.layers.head_dim // 2)
        each = each.to(places.rows.device)
        return rotation_by_axes(*places, each, each)

    def _learned(self, places: _Places, rows: int, columns: int) -> Tensor:
        """Return each patch's position embedding: an average of the four nearest in the table."""
        side = self._spec.positions_per_side
        assert side is not None
        of_rows, of_columns = (
            _neighbours(place, count, side)
            for place, count in zip(places, (rows, columns), strict=True)
        )
        found: Tensor | None = None
        for row, row_share in of_rows:
            for column, column_share in of_columns:
                part = self.pos_embed(row * side + column) * (row_share * column_share)[:, None]
                found = part if found is None else found + part
        assert found is not None
        return found


def _neighbours(place: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return each patch's two nearest learned positions along one axis, and their weights.

    All are ``[num_patches]``.

    Args:
        place: the row (or column) of each patch.
        count: number of rows (columns) of patches; they are spread evenly from the first to the
            last learned position.
        side: number of learned positions per row (column).
    """
    exact = place.float() * (side - 1) / max(count - 1, 1)
    lower = exact.floor()
    return [
        ((lower.long() + offset).clamp(0, side - 1), (1 - (exact - lower - offset).abs()).clamp(0))
        for offset in (0, 1)
    ]


def _layer(spec: QwenSpec) -> VisionLayer:
    layers = spec.layers
    attention = VisionAttention(layers, "proj", bias=True, stored_joined=True)
    mlp: nn.Module
    if spec.is_gated:
        sizes = (layers.hidden_size, layers.inner_size)
        mlp = GatedMLP(*sizes, bias=True, activation=layers.activation)
    else:
        mlp = VisionMlp(layers, _THIRD_MLP if spec.is_third else ("fc1", "fc2"))
    return VisionLayer(_NAMES, lambda: _norm(spec), attention, mlp)


def _norm(spec: QwenSpec, size: int | None = None) -> nn.Module:
    size, eps = size or spec.layers.hidden_size, spec.layers.norm_eps
    return RMSNorm(size, eps) if spec.is_gated else nn.LayerNorm(size, eps=eps)


class _Merger(nn.Module):
    """Joins each square of patches, and maps it to the text model's size (Qwen2-VL, Qwen2.5-VL)."""

    def __init__(self, spec: QwenSpec) -> None:
        super().__init__()
        self._square = spec.merge**2
        joined = spec.layers.hidden_size * self._square
        self.ln_q = _norm(spec)
        first, second = nn.Linear(joined, joined), nn.Linear(joined, spec.text_size)
        self.mlp = nn.ModuleDict({"0": first, "2": second})

    def forward(self, x: Tensor) -> Tensor:
        """Map patches ``[num_patches, hidden_size]`` to ``[num_patches / merge^2, text_size]``."""
        joined = self.ln_q(x).view(len(x) // self._square, -1)
        result: Tensor = self.mlp["2"](ACTIVATIONS["gelu"](self.mlp["0"](joined)))
        return result


class _ThirdMerger(nn.Module):
    """The merger of Qwen3-VL; in a deep layer's merger, the norm spans the joined patches."""

    def __init__(self, spec: QwenSpec, *, is_deep: bool = False) -> None:
        super().__init__()
        self._square, self._is_deep = spec.merge**2, is_deep
        joined = spec.layers.hidden_size * self._square
        self.norm = _norm(spec, joined if is_deep else None)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, spec.text_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map patches ``[num_patches, hidden_size]`` to ``[num_patches / merge^2, text_size]``."""
        shape = (len(x) // self._square, -1)
        joined = self.norm(x.view(shape)) if self._is_deep else self.norm(x).view(shape)
        result: Tensor = self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(joined)))
        return result


def _places(rows: int, columns: int, merge: int, device: torch.device) -> _Places:
    """Return the row and column of each patch, in the order of the squares."""
    row, column = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    shape = (rows // merge, merge, columns // merge, merge)
    return _Places(*(one.reshape(shape).transpose(1, 2).flatten() for one in (row, column)))


def _windows(rows: int, columns: int, spec: QwenSpec) -> tuple[Tensor, Runs]:
    """Sort an image's squares by window, so that windows of equal size are adjacent.

    Args:
        rows: number of rows of squares.
        columns: number of columns of squares.
        spec: sizes of the encoder.

    Returns:
        The squares in their new order, ``[rows * columns]`` int64, and the windows as runs of
        patches.
    """
    window, square = spec.window, spec.merge**2
    assert window is not None
    squares = torch.arange(rows * columns, device="cpu").view(rows, columns)
    by_length: dict[int, list[Tensor]] = {}
    for row in range(0, rows, window):
        for column in range(0, columns, window):
            one = squares[row : row + window, column : column + window].flatten()
            by_length.setdefault(len(one), []).append(one)
    order = torch.cat([one for alike in by_length.values() for one in alike])
    return order, tuple((len(alike), length * square) for length, alike in by_length.items())
