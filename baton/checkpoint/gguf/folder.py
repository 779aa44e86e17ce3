"""GGUF folders: makes model folders in Hugging Face layout for GGUF files, in the user's cache.

A folder's config.json, tokenizer.json and others are made once from the metadata; a link points to
the weights. So code for model folders also reads GGUF files. Knows no contents of files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.api.errors import ModelLoadError, reason_of
from baton.checkpoint.cache_folder import CacheFolderError, own_cache_folder
from baton.checkpoint.gguf.config import config_of, generation_config_of
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.gguf.parts import linked, part_files, read_model, read_places
from baton.checkpoint.gguf.tokenizer import tokenizer_config_of, tokenizer_of

WEIGHTS = "model.gguf"
# Code that decides what is written into a folder: this package, and the families of models.
_PACKAGE = Path(__file__).absolute().parent
_MAKERS = (_PACKAGE, _PACKAGE.parents[2] / "models" / "families")


def folder_of_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file, of one or several parts; make it if needed.

    Raises:
        ModelLoadError: a file is broken or unsupported, or the cache is unusable.
    """
    # Links are not followed: the hub's files are links, and the links' names count.
    file = read_places(path.absolute())
    path = file.path
    try:
        digest = hashlib.sha256(f"{code_digest(_MAKERS)}\0{path}\0".encode())
        for part in file.parts:
            digest.update(_header(part, file))
        key = digest.hexdigest()[:16]
        folder = own_cache_folder("gguf") / f"{path.stem[:80]}-{key}"
        if not (folder / WEIGHTS).exists():
            _make(folder, read_model(path))
    except CacheFolderError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except OSError as error:
        why = reason_of(error)
        problem = f"its model folder cannot be written: {why} (BATON_CACHE says where it goes)"
        raise ModelLoadError(f"{path}: {problem}") from error
    return folder


@functools.cache
def code_digest(folders: Sequence[Path]) -> str:
    """Return a digest of the Python files in some folders.

    A folder's name contains this digest, so new code does not read what old code wrote.
    """
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def read_folder(folder: Path) -> GgufFile:
    """Return the header of a folder's GGUF file, without long lists; raises ModelLoadError."""
    return read_places(linked(folder / WEIGHTS))


def weight_files(folder: Path) -> list[Path]:
    """Return the GGUF files with the weights, part by part; empty for other folders."""
    link = folder / WEIGHTS
    return part_files(linked(link)) if link.exists() else []


def _header(part: Path, file: GgufFile) -> bytes:
    """Return the bytes before the tensors' contents."""
    starts = (tensor.start for tensor in file.tensors.values() if tensor.path == part)
    with part.open("rb") as content:
        return content.read(min(starts, default=file.header_bytes))


def _make(folder: Path, file: GgufFile) -> None:
    """Write the folder under another name, then rename it, so that nobody sees it half done."""
    contents = {
        "config.json": config_of(file),
        "generation_config.json": generation_config_of(file),
    }
    if "tokenizer.ggml.tokens" in file.metadata:  # without tokens the model serves token ids only
        contents["tokenizer.json"] = tokenizer_of(file)
        contents["tokenizer_config.json"] = tokenizer_config_of(file)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for name, content in contents.items():
            text = json.dumps(content, ensure_ascii=False)
            (new / name).write_text(text, encoding="utf-8")
        (new / WEIGHTS).symlink_to(file.path)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # if it exists, another process was faster
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
