"""Model identity: properties that decide which tokens a model generates.

All nodes that serve a model have equal identities. Most entries follow from the model folder; a
node adds its numeric types. Knows no node and no router.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.api.bounded_files import read_file, read_object
from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.folder import WEIGHTS as GGUF_WEIGHTS
from baton.checkpoint.model_folder import config_digest, weights_digest

# The entries of an identity, in the order in which error messages name them.
IDENTITY_KEYS = (
    "model",
    "weights",
    "adapters",
    "tokenizer",
    "chat_template",
    "generation_config",
    "dtype",
    "kv_cache_dtype",
)
NONE = "none"
# Entry for the weights of simulated nodes, which do not load weights and may name any folder.
SIMULATED = "simulated"
_INDEX = "model.safetensors.index.json"
_DIGEST_CHARS = 16

Identity = tuple[tuple[str, str], ...]


def identity_of(entries: Mapping[str, str]) -> Identity:
    """Return the model identity among a node's entries; missing entries become empty."""
    return tuple((key, entries.get(key, "")) for key in IDENTITY_KEYS)


def describe_identity(identity: Identity) -> str:
    """Describe an identity in one line, for log lines and errors."""
    return ", ".join(f"{key} {value}" for key, value in identity if value)


def folder_identity(folder: Path) -> dict[str, str]:
    """Return the entries of the model's identity that follow from the files in its folder.

    The entry ``weights`` is left out if weight files are missing.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    entries = {
        "model": config_digest(folder),
        "tokenizer": _file_digest(folder / "tokenizer.json"),
        "chat_template": _chat_template_digest(folder),
        "generation_config": _generation_digest(folder / "generation_config.json"),
    }
    if _has_weights(folder):
        entries["weights"] = weights_digest(folder)
    return entries


def _has_weights(folder: Path) -> bool:
    """Return whether the folder has all files of the weights."""
    index = folder / _INDEX
    if not index.is_file():
        return any(folder.glob("*.safetensors")) or (folder / GGUF_WEIGHTS).is_file()
    files = _read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelLoadError(f"{index}: weight_map: must be an object of file names")
    files = set(files.values())
    return bool(files) and all((folder / name).is_file() for name in files)


def _chat_template_digest(folder: Path) -> str:
    """Return a digest of all files and fields that may hold the chat template."""
    parts = [
        _read_object(folder / name).get("chat_template")
        for name in ("tokenizer_config.json", "chat_template.json")
    ]
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    parts += [[path.name, _file_digest(path)] for path in sorted(files) if path.is_file()]
    found = [part for part in parts if part]
    return _digest(json.dumps(found, sort_keys=True).encode()) if found else NONE


def _generation_digest(path: Path) -> str:
    """Return a digest of the settings that decide which tokens end an output."""
    settings = _read_object(path)
    settings.pop("transformers_version", None)
    return _digest(json.dumps(settings, sort_keys=True).encode()) if settings else NONE


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    return read_object(path)


def _file_digest(path: Path) -> str:
    return _digest(read_file(path)) if path.is_file() else NONE


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS]
