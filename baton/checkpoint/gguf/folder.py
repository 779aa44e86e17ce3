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
from baton.checkpoint.gguf.tokenizer import tokenizer_config_of, tokenizer_of

WEIGHTS = "model.gguf"
# Counts what changes the files that are made of a header; part of their folder's name.
_FORM = 1


def folder_of_gguf(path: Path) -> Path:
    """Return the model folder of a GGUF file; make it if it is not there.

    Raises:
        ModelLoadError: the file is broken or of an unknown kind, or the cache cannot be used.
    """
    path = path.resolve()
    file = GgufFile.read(path)
    try:
        with path.open("rb") as content:
            header = content.read(file.header_bytes)
        key = hashlib.sha256(f"{_FORM}\0{path}\0".encode() + header).hexdigest()[:16]
        folder = own_cache_folder("gguf") / f"{path.stem[:80]}-{key}"
        if not (folder / WEIGHTS).exists():
            _make(folder, file)
    except CacheFolderError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except OSError as error:
        problem = f"its model folder cannot be written: {error} (BATON_CACHE says where it goes)"
        raise ModelLoadError(f"{path}: {problem}") from error
    return folder


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
