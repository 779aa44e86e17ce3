"""Model folders: from what a user typed to a folder, and what makes two folders the same model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ModelLoadError
from baton.weights_samples import read_samples

_TOKENIZER_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
# What may differ between two folders that hold the same model.
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def find_model_folder(model: str, *, weights: bool = True) -> Path:
    """The folder of a model that is given as a folder or as a hub id ("Qwen/Qwen3-0.6B").

    Args:
        weights: fetch the weights too; the router needs only the configuration and tokenizer.

    Raises:
        ModelLoadError: it is neither, or it cannot be fetched.
    """
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    except (RuntimeError, OSError, ValueError) as error:  # unknown ~user, no permission, ...
        raise ModelLoadError(f"model: {model!r} is not a usable path: {error}") from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"model: {folder} has no config.json")
        return folder
    if folder.exists():
        raise ModelLoadError(f"model: {folder} is a file; a folder or a hub id is needed")
    # A hub id is "name" or "owner/name"; everything else can only have been meant as a path.
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        raise ModelLoadError(f"model: folder {model} does not exist")
    return _fetch_from_hub(model, weights=weights)


def _fetch_from_hub(model: str, *, weights: bool) -> Path:
    # Imported here: it takes half a second, and a local folder does not need it.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _TOKENIZER_FILES + (["*.safetensors", "*.safetensors.index.json"] if weights else [])
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"model: {model!r} is no folder here and cannot be fetched from the hub: {reason}"
        ) from error


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a router must know of a model to check requests."""

    vocab_size: int
    max_position_embeddings: int


def read_limits(folder: Path) -> ModelLimits:
    """Limits from `config.json`; raises ModelLoadError naming a field that is missing or wrong."""
    config = _read_config(folder)
    values = []
    for name in ("vocab_size", "max_position_embeddings"):
        value = config.get(name)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"model: {folder / 'config.json'}: {name} must be a positive number, got {value!r}"
            )
        values.append(value)
    return ModelLimits(*values)


def config_digest(folder: Path) -> str:
    """Digest of what `config.json` says about the network; equal for equal architectures."""
    config = _read_config(folder)
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:16]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"model: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"model: {path} is not a JSON object")
    return config


def weights_digest(folder: Path) -> str:
    """Digest of the weights: their sizes, and of large files samples (`baton/weights_samples.py`).

    Raises ModelLoadError when a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                for sample in read_samples(file, size):
                    digest.update(sample)
        except OSError as error:
            raise ModelLoadError(f"model: {path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]
