"""Adapted layers: the tensors of an adapter's file by the layer that they adapt.

Refuses to know: file formats, torch, which layers a base model has.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.adapters.digest import AdapterDigest, AdapterError
from baton.adapters.numbers import DTYPE_BYTES
from baton.checkpoint.gguf.architecture import Change

_MAX_SIZE = 2**24  # maximum number of inputs or outputs of a linear layer


class Layout(enum.Enum):
    """Shapes of A and B in a file, where r is the rank and E the number of experts."""

    PLAIN = "A [r, inputs], B [outputs, r]"
    TURNED = "A [inputs, r], B [outputs, r]"  # embeddings in GGUF
    EXPERTS_IN_ROWS = "A [E * r, inputs], B [outputs, r * E]"  # stacked experts in PEFT
    EXPERTS_STACKED = "A [E, r, inputs], B [E, outputs, r]"  # GGUF


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter's file that has not been read yet.

    Attributes:
        name: the tensor's name in the file.
        dtype: a key of `DTYPE_BYTES`.
        shape: size of each axis.
        begin: offset of the tensor's first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The tensors that adapt one linear layer: ``scale * B @ A`` is added to its weight.

    For an embedding, the number of inputs is the size of the vocabulary.

    Attributes:
        name: the layer's name in the base model, such as ``model.layers.0.self_attn.q_proj``.
        scale: factor of the product.
        rank: rank of the product; with stacked experts, rank of each expert's product.
        a, b: the matrices A and B, whose shapes ``layout`` gives.
        magnitude: ``[outputs]``, the norm that each row of the adapted weight gets (DoRA,
            arXiv:2402.09353); None: the norm is left as it is.
        layout: axes of A and B.
        num_experts: experts whose layers are stacked in these tensors; None: one layer.
        is_embedding: whether the adapted layer is an embedding.
        changes: what the converter to GGUF did to the base layer's weight, and so to A and B.
    """

    name: str
    scale: float
    rank: int
    a: AdapterTensor
    b: AdapterTensor
    magnitude: AdapterTensor | None = None
    layout: Layout = Layout.PLAIN
    num_experts: int | None = None
    is_embedding: bool = False
    changes: tuple[Change, ...] = ()

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs of the layer."""
        return self.a.shape[0] if self.layout is Layout.TURNED else self.a.shape[-1]

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs of the layer; with stacked experts, of one expert."""
        return self.b.shape[-2]

    @property
    def tensors(self) -> tuple[AdapterTensor, ...]:
        """Return all tensors of this layer."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose settings, names and shapes have been checked.

    Attributes:
        path: the file with the tensors.
        modules: adapted layers, by name, sorted by name.
        uses_dora: whether the adapter's settings say DoRA.
        gguf_architecture: the metadata ``general.architecture`` of a GGUF file; empty: no GGUF
            file.
    """

    path: Path
    modules: Mapping[str, AdaptedModule]
    uses_dora: bool = False
    gguf_architecture: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(one.num_bytes for one in self.tensors())

    def tensors(self) -> list[AdapterTensor]:
        """Return all tensors in the order of their names."""
        found = [one for module in self.modules.values() for one in module.tensors]
        return sorted(found, key=lambda one: one.name)

    def wrong(self, tensor: AdapterTensor | str, problem: str) -> AdapterError:
        """Return an error about a tensor."""
        return wrong_tensor(self.path, tensor, problem)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter in memory: all that a base model needs to compute with it.

    Attributes:
        digest: identity of the content.
        data: contents of each tensor, little-endian, by the tensor's name.
    """

    digest: AdapterDigest
    files: AdapterFiles
    data: Mapping[str, bytearray] = field(repr=False)


CheckFiles = Callable[[AdapterFiles], None]


def wrong_tensor(path: Path, tensor: AdapterTensor | str, problem: str) -> AdapterError:
    """Return an error about a tensor of a file."""
    name = tensor if isinstance(tensor, str) else tensor.name
    return AdapterError(f"{path}: {name:.200}: {problem}")


def modules_by_name(path: Path, modules: Iterable[AdaptedModule]) -> dict[str, AdaptedModule]:
    """Return layers by name, sorted by name.

    Args:
        path: the file, for error messages.

    Raises:
        AdapterError: two layers have the same name.
    """
    found: dict[str, AdaptedModule] = {}
    for module in sorted(modules, key=lambda one: one.name):
        if module.name in found:
            problem = f"adapts {module.name:.200}, as {found[module.name].a.name:.200} does"
            raise wrong_tensor(path, module.a, problem)
        found[module.name] = module
    return found


def check_numbers(path: Path, tensor: AdapterTensor) -> None:
    """Raise AdapterError if a tensor's dtype or shape is not supported."""
    if tensor.dtype not in DTYPE_BYTES:
        problem = f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {tensor.dtype}"
        raise wrong_tensor(path, tensor, problem)
    if not all(1 <= size <= _MAX_SIZE for size in tensor.shape):
        problem = f"sizes must be 1 to {_MAX_SIZE}, got {shown_shape(tensor.shape)}"
        raise wrong_tensor(path, tensor, problem)


def shown_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as one short line, for error messages."""
    return f"{list(shape)}"[:80]
