"""GGUF files as model folders in Hugging Face layout, kept in the user's cache.

config.json, tokenizer.json and their like are made once of the file's metadata; the weights stay
where they are, behind a link. So whoever reads a model folder reads a GGUF file.
Refuses to know: what is in those files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from baton.api.errors import ModelLoadError
from baton.checkpoint.cache_folder import CacheFolderError, own_cache_folder
from baton.checkpoint.gguf.config import config_of, generation_config_of
from baton.checkpoint.gguf.file import GgufFile
from baton.checkpoint.gguf.parts import linked, part_files, read_model, read_places
from baton.checkpoint.gguf.tokenizer import tokenizer_config_of, tokenizer_of

WEIGHTS = "model.gguf"
# Counts what changes the files that are made of a header; part of their folder's name.
_FORM = 2


def folder_of_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file, or of one in several parts; make it if needed.

    Raises:
        ModelLoadError: a file is broken or of an unknown kind, or the cache cannot be used.
    """
    # The hub's files are links, and their names count: they are not followed.
    file = read_places(path.absolute())
    path = file.path
    try:
        digest = hashlib.sha256(f"{_FORM}\0{path}\0".encode())
        for part in file.parts:
            digest.update(_header(part, file))
        key = digest.hexdigest()[:16]
        folder = own_cache_folder("gguf") / f"{path.stem[:80]}-{key}"
        if not (folder / WEIGHTS).exists():
            _make(folder, read_model(path))
    except CacheFolderError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except OSError as error:
        problem = f"its model folder cannot be written: {error} (BATON_CACHE says where it goes)"
        raise ModelLoadError(f"{path}: {problem}") from error
    return folder


def read_folder(folder: Path) -> GgufFile:
    """Read a GGUF file's header, without long lists, by its folder; raises ModelLoadError."""
    return read_places(linked(folder / WEIGHTS))


def weight_files(folder: Path) -> list[Path]:
    """List the files with the weights, of which there may be several parts; none: another kind."""
    link = folder / WEIGHTS
    return part_files(linked(link)) if link.exists() else []


def _header(part: Path, file: GgufFile) -> bytes:
    """Read what comes before the content of a file's tensors."""
    starts = (tensor.start for tensor in file.tensors.values() if tensor.path == part)
    with part.open("rb") as content:
        return content.read(min(starts, default=file.header_bytes))


def _make(folder: Path, file: GgufFile) -> None:
    """Write the folder under another name, then rename it: nobody finds half of it."""
    contents = {
        "config.json": config_of(file),
        "generation_config.json": generation_config_of(file),
    }
    if "tokenizer.ggml.tokens" in file.metadata:  # without it the model serves token ids
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
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
