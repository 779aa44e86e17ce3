"""Layers that vision encoders share: embedding of patches, attention, feed-forward parts.

Refuses to know: families, preprocessing, the text network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from baton.telemetry.round_watch import note_progress
from models.layers.computing import Computing
from models.layers.linear import JoinedLinear
from models.vision.specs import TransformerSpec

# How patches are divided into runs; patches attend only within their run. Each pair ``(count,
# length)`` stands for ``count`` adjacent runs of ``length`` patches.
Runs = Sequence[tuple[int, int]]
# Cosines and sines for each patch, ``[num_patches, 1, head_dim]`` float32; None: no rotation.
Rotation = tuple[Tensor, Tensor] | None


class VisionEncoder(nn.Module):
    """The part of a model that turns an image's pixels into embeddings for the text network.

    Attributes:
        width: size of an embedding. Without DeepStack, this is the text network's ``hidden_size``.
            With DeepStack, an embedding also has vectors to add after layers of the text network.
        ignored: prefixes of those tensors of the encoder in checkpoints that are not used.
    """

    width: int
    ignored: tuple[str, ...] = ()

    def encode(self, pixels: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of one image: ``[num_placeholders, width]``.

        Args:
            pixels: arrays that the model's image processor returned for the image, by name.
        """
        raise NotImplementedError


# ------------------------------------------------------------------ patches


class PatchEmbedding(nn.Module):
    """The product of each patch's pixels with a matrix, which checkpoints store as a convolution.

    Args:
        hidden_size: size of a patch's embedding.
        kernel: number of channels, frames (if images have frames), rows and columns of a patch.
        bias: whether the layer has a bias.
    """

    def __init__(self, hidden_size: int, kernel: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, *kernel))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """Map pixels ``[num_patches, values per patch]`` to ``[num_patches, hidden_size]``."""
        patches = patches.to(self.weight.dtype)
        return functional.linear(patches, self.weight.flatten(1), self.bias)


def cut_patches(images: Tensor, size: int) -> tuple[Tensor, tuple[int, int]]:
    """Cut images into square patches, row by row; leave out incomplete patches at the edges.

    Args:
        images: ``[n, num_channels, height, width]``.
        size: number of pixels along a side of a patch.

    Returns:
        The patches, ``[n * rows * columns, num_channels * size * size]``, and an image's
        ``(rows, columns)`` of patches.
    """
    num_images, num_channels, height, width = images.shape
    rows, columns = height // size, width // size
    cut = images[:, :, : rows * size, : columns * size]
    cut = cut.reshape(num_images, num_channels, rows, size, columns, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2), (rows, columns)


# ------------------------------------------------------------------ layers


class VisionAttention(Computing):
    """Attention among all patches of a run.

    Args:
        spec: sizes of the layer.
        output: name of the output projection in checkpoints.
        bias: whether the projections have biases.
        stored_joined: whether checkpoints have one tensor for query, key and value projections.
    """

    def __init__(
        self, spec: TransformerSpec, output: str, *, bias: bool, stored_joined: bool = False
    ) -> None:
        super().__init__()
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        size = spec.hidden_size
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        self.qkv = JoinedLinear(size, parts, bias=bias, stored_joined=stored_joined)
        self._output = output
        self.add_module(output, nn.Linear(size, size, bias=bias))

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation) -> Tensor:
        """Return the attention's results for ``x``, ``[num_patches, hidden_size]``."""
        joined = self.qkv(x).view(len(x), 3, self._num_heads, self._head_dim)
        query = joined[:, 0]  # [num_patches, num_heads, head_dim]
        if rotation is None:
            query = query.contiguous()
        else:
            query = rotated(query, rotation)
            joined[:, 1] = rotated(joined[:, 1], rotation)
        attended = self.ops.attend_runs(query, joined[:, 1:], runs).flatten(1)
        projected: Tensor = self.get_submodule(self._output)(attended)
        return projected


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys, ``[num_patches, num_heads, head_dim]``.

    Dim i of a head pairs with dim i + ``head_dim / 2``.
    """
    cos, sin = rotation
    numbers = x.float()
    first, second = numbers.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (numbers * cos + turned * sin).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": functional.silu,
}


class VisionMlp(Computing):
    """A feed-forward part: two linear layers, with an activation between them.

    Args:
        spec: sizes of the layer.
        names: names of the linear layers in checkpoints.
    """

    def __init__(self, spec: TransformerSpec, names: tuple[str, str] = ("fc1", "fc2")) -> None:
        super().__init__()
        self._activation, self._names = spec.activation, names
        self.add_module(names[0], nn.Linear(spec.hidden_size, spec.inner_size))
        self.add_module(names[1], nn.Linear(spec.inner_size, spec.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward part's results for ``x``, ``[num_patches, hidden_size]``."""
        first, second = map(self.get_submodule, self._names)
        result: Tensor = second(self._activated(first(x)))
        return result

    def _activated(self, x: Tensor) -> Tensor:
        if self._activation != "gelu_tanh":
            return ACTIVATIONS[self._activation](x)
        # Multiply by ones, because kernels have this activation only for gates. They are several
        # times as fast as torch, and share threads with the linear layers.
        return self.ops.gate_mul(x, x.new_ones(1, x.shape[1]).expand_as(x), self._activation)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of a layer's parts in checkpoints."""

    attention_norm: str
    attention: str
    mlp_norm: str
    mlp: str


class VisionLayer(nn.Module):
    """Attention and a feed-forward part on one residual stream, with a norm before each.

    Args:
        names: names of the parts in checkpoints.
        norm: makes one of the two norms.
        attention: the attention.
        mlp: the feed-forward part.
    """

    def __init__(
        self,
        names: LayerNames,
        norm: Callable[[], nn.Module],
        attention: VisionAttention,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        norms = norm(), norm()
        self.add_module(names.attention_norm, norms[0])
        self.add_module(names.attention, attention)
        self.add_module(names.mlp_norm, norms[1])
        self.add_module(names.mlp, mlp)
        # The modules are in a tuple, because torch would register modules in an attribute a second
        # time.
        self._parts = (norms[0], attention, norms[1], mlp)

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation = None) -> Tensor:
        """Compute the layer: add its parts' results to ``x``, ``[num_patches, hidden_size]``."""
        attention_norm, attention, mlp_norm, mlp = self._parts
        x = x + attention(attention_norm(x), runs, rotation)
        result: Tensor = x + mlp(mlp_norm(x))
        return result


class Layers(nn.Module):
    """The layers of an encoder, whose names in checkpoints begin with ``layers.``."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation = None) -> Tensor:
        """Compute all layers: turn ``x``, ``[num_patches, hidden_size]``, into the same shape."""
        for layer in self.layers:
            note_progress()  # on CPUs, an image may take longer than a thread may stand still
            x = layer(x, runs, rotation)
        return x


# ------------------------------------------------------------------ rotation by rows and columns


def frequencies(theta: float, size: int) -> Tensor:
    """Return rotary frequencies of ``size`` dims: ``[size / 2]`` (Su et al., arXiv:2104.09864)."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return 1.0 / (theta**exponents)


def rotation_by_axes(rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor) -> Rotation:
    """Return the rotation of patches: half of a head's pairs rotate by row, the rest by column.

    Args:
        rows: ``[num_patches]``, each patch's row.
        columns: ``[num_patches]``, each patch's column.
        by_row: ``[head_dim / 4]``, frequencies of the pairs that rotate by row.
        by_column: ``[head_dim / 4]``, frequencies of the pairs that rotate by column.
    """
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), dim=1)
    both = torch.cat((angles, angles), dim=1)[:, None]  # [num_patches, 1, head_dim]
    return both.cos(), both.sin()
