"""GGUF folders: makes model folders in Hugging Face layout for GGUF files, in the user's cache.

config.json, tokenizer.json and other files of a folder are made once from the metadata of the GGUF
file; a link in the folder points to the GGUF file. So code for model folders can use GGUF files,
too. Does not know how the contents of these files are made.
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
# Folders of the code that decides what a model folder contains.
_PACKAGE = Path(__file__).absolute().parent
_MAKERS = (_PACKAGE, _PACKAGE.parents[2] / "models" / "families")


def folder_of_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file; make the folder if the cache lacks it.

    Args:
        path: the GGUF file, or any part of a model in several files.

    Raises:
        ModelLoadError: a file is broken or unsupported, or the cache is unusable.
    """
    # Links are not followed: files in the hub's cache are links to files whose names do not tell
    # the number of the part.
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
    """Return a digest of the Python files in ``folders``.

    The name of a model folder contains this digest, so new code does not read files of old code.
    """
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def read_folder(folder: Path) -> GgufFile:
    """Return the header of a folder's GGUF file, without long lists; raises ModelLoadError."""
    return read_places(linked(folder / WEIGHTS))


def weight_files(folder: Path) -> list[Path]:
    """Return the GGUF files that a model folder links to, in order; empty if there is no link."""
    link = folder / WEIGHTS
    return part_files(linked(link)) if link.exists() else []


def _header(part: Path, file: GgufFile) -> bytes:
    """Return the header of a part: the bytes before the tensors' contents."""
    starts = (tensor.start for tensor in file.tensors.values() if tensor.path == part)
    with part.open("rb") as content:
        return content.read(min(starts, default=file.header_bytes))


def _make(folder: Path, file: GgufFile) -> None:
    """Write the folder under a temporary name, then rename it when it is complete."""
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
            # If the folder exists now, another process has made it in the meantime.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
