"""Adapted layers: which tensors of an adapter's file adapt which layer, and how their numbers lie.

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
    """The order of the numbers of A and B in a file: r is the rank, E the number of experts."""

    PLAIN = "A [r, inputs], B [outputs, r]"
    TURNED = "A [inputs, r], B [outputs, r]"  # embeddings in GGUF
    EXPERTS_IN_ROWS = "A [E * r, inputs], B [outputs, r * E]"  # PEFT, for parameters of experts
    EXPERTS_STACKED = "A [E, r, inputs], B [E, outputs, r]"  # GGUF


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter's file that has not been read yet.

    Attributes:
        name: the tensor's name in the file.
        dtype: a key of `DTYPE_BYTES`.
        shape: the tensor's sizes.
        begin: its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """The tensors that adapt one linear layer: ``scale * B @ A`` is added to its weight.

    For an embedding, the inputs are the vocabulary.

    Attributes:
        name: the layer's name in the base model, such as ``model.layers.0.self_attn.q_proj``.
        scale: factor of the product.
        rank: rank of the product; with stacked experts, of each expert's.
        a, b: the two matrices, see ``layout``.
        magnitude: ``[outputs]``, the norm that each row of the adapted weight gets (DoRA,
            arXiv:2402.09353); None: the norm is left as it is.
        layout: order of the numbers.
        num_experts: experts whose layers are stacked in these tensors; None: one layer.
        is_embedding: whether the adapted layer is an embedding.
        changes: what the file's converter did to the base layer's tensor, and so to A and B.
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
        """Count the inputs of the layer."""
        return self.a.shape[0] if self.layout is Layout.TURNED else self.a.shape[-1]

    @property
    def num_outputs(self) -> int:
        """Count the outputs of the layer, or of one expert's."""
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
        modules: adapted layers, by name, in the order of their names.
        uses_dora: whether the adapter's settings say DoRA.
        gguf_architecture: a GGUF file's ``general.architecture``; empty: another file.
    """

    path: Path
    modules: Mapping[str, AdaptedModule]
    uses_dora: bool = False
    gguf_architecture: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors."""
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
        data: little-endian numbers of each tensor, by the tensor's name.
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
    """Return layers by name, in the order of names; raises AdapterError if a name is there twice.

    Args:
        path: the file, for error messages.
    """
    found: dict[str, AdaptedModule] = {}
    for module in sorted(modules, key=lambda one: one.name):
        if module.name in found:
            problem = f"adapts {module.name:.200}, as {found[module.name].a.name:.200} does"
            raise wrong_tensor(path, module.a, problem)
        found[module.name] = module
    return found


def check_numbers(path: Path, tensor: AdapterTensor) -> None:
    """Raise AdapterError for types and sizes that no tensor of an adapter has."""
    if tensor.dtype not in DTYPE_BYTES:
        problem = f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {tensor.dtype}"
        raise wrong_tensor(path, tensor, problem)
    if not all(1 <= size <= _MAX_SIZE for size in tensor.shape):
        problem = f"sizes must be 1 to {_MAX_SIZE}, got {shown_shape(tensor.shape)}"
        raise wrong_tensor(path, tensor, problem)


def shown_shape(shape: tuple[int, ...]) -> str:
    """Show a shape in one short line."""
    return f"{list(shape)}"[:80]
