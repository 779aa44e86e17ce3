"""Read a LoRA adapter's files, and check all of them: PEFT's layout or a GGUF file.

A folder in PEFT's layout, as ``save_pretrained`` writes it:

    adapter_config.json           settings
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight           [rank, in]
                                  base_model.model.<module>.lora_B.weight           [out, rank]
                                  base_model.model.<module>.lora_magnitude_vector   [out], DoRA only
                                  base_model.model.<module>.lora_embedding_A, _B    of embeddings

If a module has several adapted parameters that stack the layers of all experts, PEFT wraps them one
around the other: ``<module>`` then ends with one ``.base_layer`` for each parameter that was
wrapped later. Names and shapes are checked before the contents of tensors are read. Refuses to
know: torch, which modules a base model has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path

from baton.adapters.config import CONFIG_FILE, AdapterConfig, read_config
from baton.adapters.digest import AdapterDigest, AdapterError
from baton.adapters.gguf import GGUF, open_gguf
from baton.adapters.modules import (
    AdaptedModule,
    Adapter,
    AdapterFiles,
    AdapterTensor,
    CheckFiles,
    Layout,
    check_numbers,
    modules_by_name,
    shown_shape,
    wrong_tensor,
)
from baton.adapters.numbers import is_finite
from baton.api.bounded_files import size_of
from baton.api.errors import ModelLoadError, reason_of
from baton.checkpoint.safetensors_header import TensorPlace, header_of

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_BASE = ".base_layer"
# Names of parameters that may stack the layers of all experts, in their order in a module.
_STACKED = ("gate_up_proj", "up_proj", "down_proj")
_MAX_TENSORS = 200_000
_MAX_NAME_CHARS = 512
_MAX_COMPARISONS = 4 * 10**6  # limit of comparisons between patterns and layer names
_MAX_HEADER_BYTES = 32 * 2**20
_PIECE_BYTES = 2**20  # a multiple of every dtype's size
_VERSION = b"baton adapter 1\n"
# Function that returns whether all numbers of a tensor are finite, given their bytes and dtype.
CheckNumbers = Callable[[memoryview, str], bool]


def read_adapter(
    source: Path, check: CheckFiles | None = None, is_finite: CheckNumbers = is_finite
) -> Adapter:
    """Read an adapter into memory.

    Args:
        source: a folder in PEFT's layout, a GGUF file, or a folder with a single GGUF file.
        check: checks names and shapes against a base model before the tensors are read; raises
            AdapterError.
        is_finite: function to use instead of `numbers.is_finite`, for callers with a faster
            function.

    Raises:
        AdapterError: a file is missing, damaged or unsupported; the message names the file and the
            field or tensor, in one line.
    """
    files = open_adapter(source)
    if check is not None:
        check(files)
    data: dict[str, bytearray] = {}

    def place(tensor: AdapterTensor) -> bytearray:
        data[tensor.name] = bytearray(tensor.num_bytes)
        return data[tensor.name]

    return Adapter(_read_numbers(files, place, is_finite), files, data)


def adapter_digest(source: Path) -> AdapterDigest:
    """Return an adapter's digest, without keeping its tensors in memory; raises AdapterError."""
    buffer = bytearray(_PIECE_BYTES)
    return _read_numbers(open_adapter(source), lambda tensor: buffer, is_finite)


def open_adapter(source: Path) -> AdapterFiles:
    """Read an adapter's settings, and the names and shapes of its tensors; raises AdapterError.

    Args:
        source: a folder in PEFT's layout, a GGUF file, or a folder with a single GGUF file.
    """
    gguf = _gguf_of(source)
    if gguf is not None:
        return open_gguf(gguf)
    if not source.is_dir():
        problem = "is no folder with an adapter" if source.exists() else "no such folder"
        raise AdapterError(f"{source}: {problem}")
    config, path = read_config(source), source / WEIGHTS_FILE
    if not path.exists() and (source / _PICKLED_FILE).exists():
        problem = f"runs code when it is read; save the adapter as {WEIGHTS_FILE}"
        raise AdapterError(f"{source / _PICKLED_FILE}: {problem}")
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
    return AdapterFiles(path, _modules(path, config, places), config.uses_dora)


def _gguf_of(source: Path) -> Path | None:
    """Return the GGUF file that a path names or its folder contains; None: there is none.

    Raises:
        AdapterError: a folder without settings has several GGUF files.
    """
    if source.suffix.lower() == GGUF and not source.is_dir():
        return source
    if (
        not source.is_dir()
        or (source / CONFIG_FILE).is_symlink()
        or (source / CONFIG_FILE).exists()
    ):
        return None
    found = sorted(source.glob(f"*{GGUF}"))
    if len(found) > 1:
        raise AdapterError(f"{source}: has {len(found)} {GGUF} files; name one")
    return found[0] if found else None


def find_adapter(root: Path, source: str) -> Path:
    """Return the folder or GGUF file of an adapter, all of whose files must lie below ``root``.

    Args:
        source: the path relative to ``root``.

    Raises:
        AdapterError: there is no such folder, or the path or a link leads out of ``root``.
    """
    relative, shown = Path(source), f"{source!r:.200}"
    is_plain = source.isprintable() and not relative.is_absolute() and ".." not in relative.parts
    if not source or not is_plain:
        raise AdapterError(f"{shown}: must be a path below the adapters' folder")
    base, folder = root.resolve(), root / relative
    try:
        named = (folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE)
        for path in (*named, *folder.glob(f"*{GGUF}")):
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
            raise wrong_tensor(path, name, "is there twice")
        num_bytes = place.end - place.begin
        parts[kind] = AdapterTensor(name, place.dtype, place.shape, place.begin, num_bytes)
        check_numbers(path, parts[kind])
    num_patterns = sum(map(len, (config.rank_pattern, config.alpha_pattern)))
    if (num_patterns + len(config.target_parameters)) * len(found) > _MAX_COMPARISONS:
        problem = f"{num_patterns} patterns for {len(found)} layers are too many"
        raise AdapterError(f"{path}: {problem}")
    modules = [_module(path, config, name, parts) for name, parts in found.items()]
    return modules_by_name(path, modules)


def _split_name(path: Path, name: str) -> tuple[str, str]:
    """Split a tensor's name into the layer's name and the kind of LoRA tensor.

    Raises:
        AdapterError: the tensor is no LoRA tensor.
    """
    plain = name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name
    for kind in (_A, _B, _MAGNITUDE, _EMBEDDING_A, _EMBEDDING_B):
        module = plain.removeprefix(_PREFIX).removesuffix(kind)
        if plain == f"{_PREFIX}{module}{kind}" and module and len(name) <= _MAX_NAME_CHARS:
            return module, kind
    if name.endswith(f"{_BASE}.weight"):
        problem = "is a copy of the base model's weight; save with save_embedding_layers=False"
        raise wrong_tensor(path, name, problem)
    raise wrong_tensor(path, name, "is no LoRA tensor of a linear layer or embedding")


def _module(
    path: Path, config: AdapterConfig, stored: str, parts: Mapping[str, AdapterTensor]
) -> AdaptedModule:
    """Make an adapted layer from tensors; check that none is missing and their shapes match.

    Args:
        stored: the layer's name in the file.
    """
    is_embedding = _EMBEDDING_A in parts or _EMBEDDING_B in parts
    kinds = (_EMBEDDING_A, _EMBEDDING_B) if is_embedding else (_A, _B)
    name, key, is_stacked = _resolved(config, stored)
    for kind in (*kinds, _MAGNITUDE) if config.uses_dora else kinds:
        if kind not in parts:
            raise wrong_tensor(path, f"{_PREFIX}{stored:.200}{kind}", "is missing")
    for kind, one in parts.items():
        if kind not in (*kinds, _MAGNITUDE):
            raise wrong_tensor(
                path, one, "is for a linear layer, and other tensors for an embedding"
            )
    a, b, magnitude = parts[kinds[0]], parts[kinds[1]], parts.get(_MAGNITUDE)
    if magnitude is not None and not config.uses_dora:
        raise wrong_tensor(path, magnitude, f"{CONFIG_FILE} does not set use_dora")
    if magnitude is not None and is_embedding:
        raise wrong_tensor(path, magnitude, "DoRA of embeddings is not supported")
    rank, num_experts = config.rank_of(key), None
    if is_stacked and len(a.shape) == 2:
        num_experts = a.shape[0] // rank
    whole = rank * (num_experts or 1)
    if len(a.shape) != 2 or a.shape[0] != whole:
        problem = f"shape {shown_shape(a.shape)}, but {CONFIG_FILE} means [{whole}, inputs]"
        raise wrong_tensor(path, a, problem)
    if len(b.shape) != 2 or b.shape[1] != whole:
        problem = f"shape {shown_shape(b.shape)}, but {CONFIG_FILE} means [outputs, {whole}]"
        raise wrong_tensor(path, b, problem)
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        problem = f"shape {shown_shape(magnitude.shape)}, but lora_B has {b.shape[0]} outputs"
        raise wrong_tensor(path, magnitude, problem)
    return AdaptedModule(
        name, config.scale_of(key), rank, a, b, magnitude,
        Layout.EXPERTS_IN_ROWS if is_stacked else Layout.PLAIN, num_experts, is_embedding,
    )  # fmt: skip


def _resolved(config: AdapterConfig, stored: str) -> tuple[str, str, bool]:
    """Find the layer of the base model that a layer's name in a file stands for.

    Returns:
        The name in the base model; the name that patterns of ranks match; and whether the layer is
        a parameter that stacks the layers of all experts.
    """
    module, depth = stored, 0
    while module.endswith(_BASE):
        module, depth = module.removesuffix(_BASE), depth + 1
    if config.targets_parameter(f"{module}.weight") and not depth:
        return module, f"{module}.weight", False
    wrapped = [one for one in _STACKED if config.targets_parameter(f"{module}.{one}")]
    if depth >= len(wrapped):
        return stored, stored, False
    name = f"{module}.{wrapped[-1 - depth]}"  # the parameter that was wrapped last is outermost
    return name, name, True


def _read_numbers(
    files: AdapterFiles, place: Callable[[AdapterTensor], bytearray], is_finite: CheckNumbers
) -> AdapterDigest:
    """Read and check the contents of all tensors; return the adapter's digest.

    Args:
        place: returns the memory to read a tensor to, which may have room for only one piece.

    Raises:
        AdapterError: the file ends early, or a number is NaN or infinite.
    """
    scales = {name: module.scale for name, module in files.modules.items()}
    settings: dict[str, object] = {"dora": files.uses_dora, "scales": scales}
    # The architecture of a GGUF file decides the order of rows and columns in A and B, so it is a
    # part of the digest.
    if files.gguf_architecture:
        settings["gguf"] = files.gguf_architecture
    digest = hashlib.sha256(_VERSION + _framed(settings))
    try:
        with files.path.open("rb", buffering=0) as file:
            for tensor in files.tensors():
                digest.update(_framed([tensor.name, tensor.dtype, list(tensor.shape)]))
                for piece in _pieces(files, tensor, file, place(tensor)):
                    digest.update(piece)
                    if not is_finite(piece, tensor.dtype):
                        raise files.wrong(tensor, "a number is NaN or infinite")
    except OSError as error:
        raise _unreadable(files.path, error) from error
    return digest.hexdigest()


def _pieces(
    files: AdapterFiles, tensor: AdapterTensor, file: RawIOBase, memory: bytearray
) -> Iterator[memoryview]:
    """Read a tensor in pieces, each of whole numbers; raises AdapterError if the file ends early.

    Args:
        memory: room for the whole tensor, or for one piece, which the next piece overwrites.
    """
    file.seek(tensor.begin)
    for first in range(0, tensor.num_bytes, _PIECE_BYTES):
        size = min(tensor.num_bytes - first, _PIECE_BYTES)
        begin = first if len(memory) >= tensor.num_bytes else 0
        piece = memoryview(memory)[begin : begin + size]
        num_read = 0
        while num_read < size:
            if not (count := file.readinto(piece[num_read:])):
                raise files.wrong(tensor, "the file ends before it; was it changed meanwhile?")
            num_read += count
        yield piece


def _framed(value: object) -> bytes:
    """Return a value as JSON, preceded by the JSON's length."""
    text = json.dumps(value, sort_keys=True).encode()
    return len(text).to_bytes(8, "little") + text


def _unreadable(path: Path, error: OSError) -> AdapterError:
    return AdapterError(f"{path}: cannot be read: {reason_of(error)}")


__all__ = [
    "WEIGHTS_FILE",
    "AdaptedModule",
    "Adapter",
    "AdapterFiles",
    "AdapterTensor",
    "CheckFiles",
    "adapter_digest",
    "find_adapter",
    "open_adapter",
    "read_adapter",
]
