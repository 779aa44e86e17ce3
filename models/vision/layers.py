"""Layers that vision encoders share: patches, attention within runs of patches, feed-forward parts.

Refuses to know: families, preprocessing, the text network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.computing import Computing
from models.layers.linear import JoinedLinear
from models.vision.specs import TransformerSpec

# Runs of patches that attend to each other, as ``(count, length)`` pairs in order: ``count``
# adjacent runs of ``length`` patches each.
Runs = Sequence[tuple[int, int]]
# Cosines and sines of each patch, ``[num_patches, 1, head_dim]`` float32; None: no rotation.
Rotation = tuple[Tensor, Tensor] | None


class VisionEncoder(nn.Module):
    """The part of a model that turns pixel values into embeddings.

    Attributes:
        width: numbers per embedding: the text network's ``hidden_size``, or a multiple of it if
            vectors are also added after layers of the text network (DeepStack).
        ignored: prefixes of unused names in checkpoints, within the encoder.
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
    """A product of each patch's pixels with one matrix, stored as a convolution's weight.

    Args:
        hidden_size: size of the results.
        kernel: channels, frames if any, rows and columns of a patch.
        bias: whether there is a bias.
    """

    def __init__(self, hidden_size: int, kernel: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, *kernel))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """Map pixels ``[num_patches, numbers of a kernel]`` to ``[num_patches, hidden_size]``."""
        patches = patches.to(self.weight.dtype)
        return functional.linear(patches, self.weight.flatten(1), self.bias)


def cut_patches(images: Tensor, size: int) -> tuple[Tensor, tuple[int, int]]:
    """Cut images into patches, row by row; incomplete patches are left out.

    Args:
        images: ``[n, num_channels, height, width]``.
        size: pixels in a row of a patch.

    Returns:
        ``[n * rows * columns, num_channels * size * size]``, and ``(rows, columns)``.
    """
    num_images, num_channels, height, width = images.shape
    rows, columns = height // size, width // size
    cut = images[:, :, : rows * size, : columns * size]
    cut = cut.reshape(num_images, num_channels, rows, size, columns, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2), (rows, columns)


# ------------------------------------------------------------------ layers


class VisionAttention(Computing):
    """Attention of all patches of a run to each other.

    Args:
        spec: sizes of the layer.
        output: name of the output projection in checkpoints.
        bias: whether the projections have biases.
        stored_joined: whether checkpoints have queries, keys and values joined.
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
        """Map ``[num_patches, hidden_size]`` to results of the same shape."""
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
    """Rotate ``[num_patches, num_heads, head_dim]``, pairing dims i and i + ``head_dim / 2``."""
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


class VisionMlp(nn.Module):
    """A feed-forward part of two linear layers.

    Args:
        spec: sizes of the layer.
        names: names of the linear layers in checkpoints.
    """

    def __init__(self, spec: TransformerSpec, names: tuple[str, str] = ("fc1", "fc2")) -> None:
        super().__init__()
        self._activation, self._names = ACTIVATIONS[spec.activation], names
        self.add_module(names[0], nn.Linear(spec.hidden_size, spec.inner_size))
        self.add_module(names[1], nn.Linear(spec.inner_size, spec.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[num_patches, hidden_size]`` to results of the same shape."""
        first, second = map(self.get_submodule, self._names)
        result: Tensor = second(self._activation(first(x)))
        return result


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
        norm: makes a norm.
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
        # a tuple, so that torch does not register the modules twice
        self._parts = (norms[0], attention, norms[1], mlp)

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation = None) -> Tensor:
        """Map ``[num_patches, hidden_size]`` to results of the same shape."""
        attention_norm, attention, mlp_norm, mlp = self._parts
        x = x + attention(attention_norm(x), runs, rotation)
        result: Tensor = x + mlp(mlp_norm(x))
        return result


class Layers(nn.Module):
    """Layers that checkpoints keep under ``layers.``."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, runs: Runs, rotation: Rotation = None) -> Tensor:
        """Map ``[num_patches, hidden_size]`` to results of the same shape."""
        for layer in self.layers:
            x = layer(x, runs, rotation)
        return x


# ------------------------------------------------------------------ rotation by rows and columns


def frequencies(theta: float, size: int) -> Tensor:
    """Return ``[size / 2]`` rotary frequencies (Su et al., arXiv:2104.09864), on the CPU."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return 1.0 / (theta**exponents)


def rotation_by_axes(rows: Tensor, columns: Tensor, by_row: Tensor, by_column: Tensor) -> Rotation:
    """Make the rotation of patches: half of a head's pairs rotate by row, the rest by column.

    Args:
        rows: ``[num_patches]``, each patch's row.
        columns: ``[num_patches]``, each patch's column.
        by_row: ``[head_dim / 4]`` frequencies of the first pairs.
        by_column: ``[head_dim / 4]`` frequencies of the other pairs.
    """
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), dim=1)
    both = torch.cat((angles, angles), dim=1)[:, None]  # [num_patches, 1, head_dim]
    return both.cos(), both.sin()
