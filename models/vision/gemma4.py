"""Gemma 4's vision encoder: images of any size, rotary positions, averages of patches.

::

    patches [n, 3 * side^2] -> product + learned positions -> layers -> averages of k x k neighbours
    [n / k^2, hidden] * sqrt(hidden) -> norm -> product [n / k^2, text size]

The image processor cuts an image into patches, and adds padding up to a fixed number of patches.
The encoder leaves the padding out.
Refuses to know: how images are resized (`baton/media/layouts/gemma4.py`), the text network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.computing import Computing
from models.layers.norm import RMSNorm
from models.recipe import NormWeight
from models.vision.layers import ACTIVATIONS, Layers, Rotation, Runs, VisionEncoder, frequencies
from models.vision.specs import Gemma4Spec, TransformerSpec

_LIMITS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4Encoder(VisionEncoder):
    """The vision part of Gemma 4.

    Args:
        spec: sizes of the encoder.
        text_size: size of the text network's embeddings.
    """

    def __init__(self, spec: Gemma4Spec, text_size: int) -> None:
        super().__init__()
        self.width = text_size
        self.vision_tower = _Transformer(spec)
        self.embed_vision = _Projector(spec.layers, text_size)

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image, ``[num_placeholders, width]``.

        ``pixel_values`` are patches ``[n, 3 * side^2]``, row by row. ``image_position_ids`` are the
        column and row of each patch, ``[n, 2]``; -1 for padding.
        """
        positions = pixels["image_position_ids"]
        is_real = (positions >= 0).all(dim=1)
        x = self.vision_tower(pixels["pixel_values"][is_real], positions[is_real])
        embeddings: Tensor = self.embed_vision(x)
        return embeddings


class _Transformer(nn.Module):
    def __init__(self, spec: Gemma4Spec) -> None:
        super().__init__()
        self._spec, layers = spec, spec.layers
        self.patch_embedder = _Patches(spec)
        self.encoder = Layers(_Layer(spec) for _ in range(layers.num_layers))
        if spec.is_standardized:
            self.std_bias, self.std_scale = (
                nn.Parameter(torch.empty(layers.hidden_size)) for _ in range(2)
            )

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Encode patches ``[n, 3 * side^2]`` at ``positions``: ``[n / square^2, hidden_size]``."""
        x = self.patch_embedder(patches, positions)
        x = self.encoder(x, ((1, len(x)),), self._rotation(positions))
        columns, square = int(positions[:, 0].max()) + 1, self._spec.square
        by_square = x.float().view(-1, square, columns // square, square, x.shape[1])
        pooled = by_square.mean(dim=(1, 3)).flatten(0, 1).to(x.dtype).float()
        pooled = pooled * self._spec.layers.hidden_size**0.5  # may be too large for float16
        if self._spec.is_standardized:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        embeddings: Tensor = pooled.to(x.dtype)
        return embeddings

    def _rotation(self, positions: Tensor) -> Rotation:
        """Return cosines and sines by column and by row, each ``[n, 1, 2, head_dim / 2]``."""
        each = frequencies(self._spec.theta, self._spec.layers.head_dim // 2).to(positions.device)
        angles = positions[:, :, None].float() * each  # [n, 2, head_dim / 4]
        both = torch.cat((angles, angles), dim=2)[:, None]
        return both.cos(), both.sin()


class _Patches(nn.Module):
    """The first layer: each patch's embedding, plus learned positions of its column and row."""

    def __init__(self, spec: Gemma4Spec) -> None:
        super().__init__()
        size = spec.layers.hidden_size
        self.input_proj = nn.Linear(3 * spec.patch_size**2, size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, spec.num_positions, size))

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Map patches, ``[n, 3 * side^2]`` with values from 0 to 1, to ``[n, hidden_size]``."""
        x = self.input_proj((2 * (patches - 0.5)).to(self.input_proj.weight.dtype))
        columns, rows = self.position_embedding_table
        placed: Tensor = x + (columns[positions[:, 0]] + rows[positions[:, 1]])
        return placed


class _ClippedLinear(nn.Module):
    """A linear layer whose inputs and results may be clipped to limits from the checkpoint."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, num_inputs: int, num_outputs: int, *, is_clipped: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs, bias=False)
        self._is_clipped = is_clipped
        if is_clipped:
            for name in _LIMITS:
                self.register_parameter(name, nn.Parameter(torch.empty(())))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, num_inputs]`` to ``[n, num_outputs]``."""
        if self._is_clipped:
            x = x.clamp(self.input_min, self.input_max)
        result: Tensor = self.linear(x)
        return result.clamp(self.output_min, self.output_max) if self._is_clipped else result


class _Layer(nn.Module):
    """Attention and a feed-forward part on one residual stream; norms before and after each."""

    def __init__(self, spec: Gemma4Spec) -> None:
        super().__init__()
        self.self_attn = _Attention(spec)
        self.mlp = _Mlp(spec)

        def norm() -> RMSNorm:
            return RMSNorm(spec.layers.hidden_size, spec.layers.norm_eps, NormWeight.WIDE)

        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation) -> Tensor:
        """Compute the layer: add its parts' results to ``x``, ``[num_patches, hidden_size]``."""
        attended = self.self_attn(self.input_layernorm(x), runs, rotation)
        x = x + self.post_attention_layernorm(attended)
        fed: Tensor = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + fed


class _Attention(Computing):
    """Attention among all patches of a run, with norms of queries, keys and values."""

    def __init__(self, spec: Gemma4Spec) -> None:
        super().__init__()
        layers = spec.layers
        self._num_heads, self._head_dim, self._eps = (
            layers.num_heads,
            layers.head_dim,
            layers.norm_eps,
        )
        size = layers.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _ClippedLinear(size, size, is_clipped=spec.is_clipped) for _ in range(4)
        )
        self.q_norm, self.k_norm = (
            RMSNorm(layers.head_dim, layers.norm_eps, NormWeight.WIDE) for _ in range(2)
        )

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation) -> Tensor:
        """Return the attention's results for ``x``, ``[num_patches, hidden_size]``."""
        assert rotation is not None
        shape = (len(x), self._num_heads, self._head_dim)
        # This model does not divide scores by sqrt(head_dim), but `attend_runs` does.
        query = _turned(self.q_norm(self.q_proj(x).view(shape)), rotation) * self._head_dim**0.5
        key = _turned(self.k_norm(self.k_proj(x).view(shape)), rotation)
        value = _normed(self.v_proj(x).view(shape), self._eps)
        attended = self.ops.attend_runs(query, torch.stack((key, value), dim=1), runs)
        result: Tensor = self.o_proj(attended.flatten(1))
        return result


class _Mlp(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, spec: Gemma4Spec) -> None:
        super().__init__()
        size, inner = spec.layers.hidden_size, spec.layers.inner_size
        self.gate_proj, self.up_proj = (
            _ClippedLinear(size, inner, is_clipped=spec.is_clipped) for _ in range(2)
        )
        self.down_proj = _ClippedLinear(inner, size, is_clipped=spec.is_clipped)
        self._activation = ACTIVATIONS[spec.layers.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward part's results for ``x``, ``[num_patches, hidden_size]``."""
        result: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Projector(nn.Module):
    """The last layer: maps averages of patches to the size of the text model's embeddings."""

    def __init__(self, spec: TransformerSpec, text_size: int) -> None:
        super().__init__()
        self._eps = spec.norm_eps
        self.embedding_projection = nn.Linear(spec.hidden_size, text_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, hidden_size]`` to ``[n, text_size]``."""
        projected: Tensor = self.embedding_projection(_normed(x, self._eps))
        return projected


def _normed(x: Tensor, eps: float) -> Tensor:
    """Normalize ``[..., size]`` over the last dimension, without a weight."""
    return functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def _turned(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys, ``[num_patches, num_heads, head_dim]``.

    The first half of a head is rotated by the patch's column, the second half by its row. Within a
    half, dim i pairs with dim i + ``head_dim / 4``.
    """
    cos, sin = rotation
    halves = x.float().view(*x.shape[:2], 2, -1)
    first, second = halves.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (halves * cos + turned * sin).flatten(2).to(x.dtype)
