"""Read a LoRA adapter's folder, as PEFT's ``save_pretrained`` writes it, and check all of it.

    adapter_config.json           settings
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight           [rank, in]
                                  base_model.model.<module>.lora_B.weight           [out, rank]
                                  base_model.model.<module>.lora_magnitude_vector   [out], DoRA only

Names and shapes are checked before any number is read. Refuses to know: torch, which modules a base
model has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from baton.adapters.config import CONFIG_FILE, AdapterConfig, read_config
from baton.adapters.digest import AdapterDigest, AdapterError
from baton.adapters.numbers import DTYPE_BYTES, is_finite
from baton.api.bounded_files import size_of
from baton.api.errors import ModelLoadError, reason_of
from baton.checkpoint.safetensors_header import TensorPlace, header_of

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_MAX_TENSORS = 200_000
_MAX_HEADER_BYTES = 32 * 2**20
_MAX_SIZE = 2**24  # inputs or outputs of a linear layer
_PIECE_BYTES = 2**20  # a multiple of every number's size
_VERSION = b"baton adapter 1\n"


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

    Attributes:
        name: the layer's name in the base model, such as ``model.layers.0.self_attn.q_proj``.
        scale: factor of the product.
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``.
        magnitude: ``[out_features]``, the norm that each row of the adapted weight gets (DoRA,
            arXiv:2402.09353); None: the norm is left as it is.
    """

    name: str
    scale: float
    a: AdapterTensor
    b: AdapterTensor
    magnitude: AdapterTensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

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
    """

    path: Path
    config: AdapterConfig
    modules: Mapping[str, AdaptedModule]

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
        name = tensor if isinstance(tensor, str) else tensor.name
        return AdapterError(f"{self.path}: {name:.200}: {problem}")


@dataclass(frozen=True, slots=True, eq=False)
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


def read_adapter(folder: Path, check: CheckFiles | None = None) -> Adapter:
    """Read an adapter into memory.

    Args:
        folder: the adapter's folder.
        check: checks names and shapes against a base model before any number is read; raises
            AdapterError.

    Raises:
        AdapterError: a file is missing, damaged or unsupported; one line that names the file and
            the field or tensor.
    """
    files = open_adapter(folder)
    if check is not None:
        check(files)
    data: dict[str, bytearray] = {one.name: bytearray() for one in files.tensors()}
    digest = _read_numbers(files, lambda tensor, piece: data[tensor.name].extend(piece))
    return Adapter(digest, files, data)


def adapter_digest(folder: Path) -> AdapterDigest:
    """Return the digest of an adapter's content, in little memory; raises AdapterError."""
    return _read_numbers(open_adapter(folder), lambda tensor, piece: None)


def open_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter's settings, and the names and shapes of its tensors; raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such folder")
    config, path = read_config(folder), folder / WEIGHTS_FILE
    if not path.exists() and (folder / _PICKLED_FILE).exists():
        problem = f"runs code when it is read; save the adapter as {WEIGHTS_FILE}"
        raise AdapterError(f"{folder / _PICKLED_FILE}: {problem}")
    try:
        size = size_of(path)
        with path.open("rb") as file:
            places = header_of(file, size, _MAX_HEADER_BYTES)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        problem = f"not a readable safetensors file: {error}"
        raise AdapterError(f"{path}: {problem}") from error
    return AdapterFiles(path, config, _modules(path, config, places))


def find_adapter(root: Path, source: str) -> Path:
    """Return the folder of an adapter below ``root``, where all its files must lie, too.

    Args:
        source: the folder's path relative to ``root``.

    Raises:
        AdapterError: there is no such folder, or the path or a link leads out of ``root``.
    """
    relative, shown = Path(source), f"{source!r:.200}"
    is_plain = source.isprintable() and not relative.is_absolute() and ".." not in relative.parts
    if not source or not is_plain:
        raise AdapterError(f"{shown}: must be a path below the adapters' folder")
    base, folder = root.resolve(), root / relative
    try:
        for path in (folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE):
            if not path.resolve().is_relative_to(base):
                raise AdapterError(f"{shown}: leads out of the adapters' folder")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise AdapterError(f"{shown}: cannot be read: {reason_of(error)}") from error
    return folder


def _modules(
    path: Path, config: AdapterConfig, places: Mapping[str, TensorPlace]
) -> dict[str, AdaptedModule]:
    """Group a file's tensors by the layer that they adapt, and check that they fit together."""
    if not 0 < len(places) <= _MAX_TENSORS:
        raise AdapterError(f"{path}: must have 1 to {_MAX_TENSORS} tensors, got {len(places)}")
    found: dict[str, dict[str, AdapterTensor]] = {}
    for name, place in places.items():
        module, kind = _split_name(path, name)
        parts = found.setdefault(module, {})
        if kind in parts:
            raise AdapterError(f"{path}: {name:.200}: is there twice")
        parts[kind] = _tensor(path, name, place)
    return {name: _module(path, config, name, found[name]) for name in sorted(found)}


def _split_name(path: Path, name: str) -> tuple[str, str]:
    """Return a tensor's layer and kind; raises AdapterError for other tensors than LoRA's."""
    plain = name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name
    for kind in (_A, _B, _MAGNITUDE):
        module = plain.removeprefix(_PREFIX).removesuffix(kind)
        if plain == f"{_PREFIX}{module}{kind}" and module:
            return module, kind
    if ".lora_embedding_" in name:
        raise AdapterError(f"{path}: {name:.200}: adapters of embeddings are not supported")
    raise AdapterError(f"{path}: {name:.200}: is no LoRA tensor of a linear layer")


def _tensor(path: Path, name: str, place: TensorPlace) -> AdapterTensor:
    if place.dtype not in DTYPE_BYTES:
        problem = f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {place.dtype}"
        raise AdapterError(f"{path}: {name:.200}: {problem}")
    if not all(1 <= size <= _MAX_SIZE for size in place.shape):
        problem = f"sizes must be 1 to {_MAX_SIZE}, got {_shape(place.shape)}"
        raise AdapterError(f"{path}: {name:.200}: {problem}")
    return AdapterTensor(name, place.dtype, place.shape, place.begin, place.end - place.begin)


def _module(
    path: Path, config: AdapterConfig, name: str, parts: Mapping[str, AdapterTensor]
) -> AdaptedModule:
    """Check that the tensors of one layer are complete and of matching shapes."""
    kinds = (_A, _B, _MAGNITUDE) if config.uses_dora else (_A, _B)
    for kind in kinds:
        if kind not in parts:
            raise AdapterError(f"{path}: {_PREFIX}{name:.200}{kind}: is missing")
    a, b, magnitude = parts[_A], parts[_B], parts.get(_MAGNITUDE)
    if magnitude is not None and not config.uses_dora:
        problem = f"{CONFIG_FILE} does not set use_dora"
        raise AdapterError(f"{path}: {magnitude.name:.200}: {problem}")
    rank = config.rank_of(name)
    if len(a.shape) != 2 or a.shape[0] != rank:
        problem = f"shape {_shape(a.shape)}, but {CONFIG_FILE} means [{rank}, inputs]"
        raise AdapterError(f"{path}: {a.name:.200}: {problem}")
    if len(b.shape) != 2 or b.shape[1] != rank:
        problem = f"shape {_shape(b.shape)}, but {CONFIG_FILE} means [outputs, {rank}]"
        raise AdapterError(f"{path}: {b.name:.200}: {problem}")
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        problem = f"shape {_shape(magnitude.shape)}, but lora_B has {b.shape[0]} outputs"
        raise AdapterError(f"{path}: {magnitude.name:.200}: {problem}")
    return AdaptedModule(name, config.scale_of(name), a, b, magnitude)


def _shape(shape: tuple[int, ...]) -> str:
    return f"{list(shape)}"[:80]


def _read_numbers(
    files: AdapterFiles, keep: Callable[[AdapterTensor, bytes], None]
) -> AdapterDigest:
    """Read all numbers, pass each piece to ``keep``, and return the content's digest.

    Raises:
        AdapterError: the file ends early, or a number is NaN or infinite.
    """
    scales = {name: module.scale for name, module in files.modules.items()}
    settings = {"dora": files.config.uses_dora, "scales": scales}
    digest = hashlib.sha256(_VERSION + _framed(settings))
    try:
        with files.path.open("rb") as file:
            for tensor in files.tensors():
                digest.update(_framed([tensor.name, tensor.dtype, list(tensor.shape)]))
                for piece in _pieces(files, tensor, file):
                    digest.update(piece)
                    keep(tensor, piece)
    except OSError as error:
        raise _unreadable(files.path, error) from error
    return digest.hexdigest()


def _pieces(files: AdapterFiles, tensor: AdapterTensor, file: BinaryIO) -> Iterator[bytes]:
    """Read a tensor in pieces whose numbers are finite."""
    file.seek(tensor.begin)
    left = tensor.num_bytes
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        left -= len(piece)
        if not piece or len(piece) % DTYPE_BYTES[tensor.dtype]:
            raise files.wrong(tensor, "the file ends before it; was it changed meanwhile?")
        if not is_finite(piece, tensor.dtype):
            raise files.wrong(tensor, "a number is NaN or infinite")
        yield piece


def _framed(value: object) -> bytes:
    """Return a value as JSON, behind its length."""
    text = json.dumps(value, sort_keys=True).encode()
    return len(text).to_bytes(8, "little") + text


def _unreadable(path: Path, error: OSError) -> AdapterError:
    return AdapterError(f"{path}: cannot be read: {reason_of(error)}")
