"""Models of the Hugging Face hub: fetches a folder of files, or the GGUF file of a quantization.

Folders go to the hub library's cache; GGUF files go to Baton's cache, where interrupted downloads
are resumed. If the hub cannot be reached, cached files are used. Does not read the contents of
files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baton.api.errors import ModelLoadError
from baton.checkpoint.cache_folder import CacheFolderError, own_cache_folder
from baton.checkpoint.gguf.parts import first_part, list_models, part_files

logger = logging.getLogger(__name__)

_SCHEME, _GGUF, _SAFETENSORS = "hf://", ".gguf", ".safetensors"
_OWNER_AND_NAME = r"[\w.-]+/[\w.-]+"
_NAME = re.compile(rf"(?P<repository>{_OWNER_AND_NAME})(?::(?P<quantization>[\w.-]+))?")
_FILE = re.compile(rf"(?P<repository>{_OWNER_AND_NAME})/(?P<file>[\w./ +-]+\.gguf)", re.IGNORECASE)
# Names of quantizations (such as Q4_K_M) in the names of GGUF files.
_QUANTIZATION = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*)", re.IGNORECASE)
_PART_OF_FILE = ".part"
_SHOWN_FILES = 8
# The part of a library's error text that quotes an error of the operating system.
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub, as a user named it.

    Attributes:
        repository: the repository on the hub, as OWNER/NAME.
        quantization: quantization of the GGUF file to use; None: the user named no quantization.
        file: path of a GGUF file in the repository; None: the user named no file.
    """

    repository: str
    quantization: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, model: str) -> HubName | None:
        """Parse the name of a model of the hub; return None if the text is no such name.

        A name is OWNER/NAME or OWNER/NAME:QUANTIZATION, both with or without ``hf://`` in front, or
        hf://OWNER/NAME/FILE.gguf.
        """
        name = model.removeprefix(_SCHEME)
        if found := _NAME.fullmatch(name):
            return cls(found["repository"], found["quantization"])
        found = _FILE.fullmatch(name) if name != model else None
        return cls(found["repository"], file=found["file"]) if found else None


def fetch(model: str, name: HubName, patterns: Sequence[str]) -> Path:
    """Fetch a model and return its folder or its GGUF file (the first part of several).

    Args:
        model: the text in which the user named the model, to quote in errors.
        name: this text, parsed.
        patterns: patterns of the files that a folder needs.

    Raises:
        ModelLoadError: the hub lacks the model, or cannot be reached and nothing is cached.
    """
    files = None if name.file else _files_of(model, name)
    if name.file:
        chosen = str(first_part(Path(name.file)))
    elif name.quantization or (files is not None and _has_gguf_alone(files)):
        chosen = _choose(model, name, files or ())
    else:
        return _snapshot(model, name.repository, patterns)
    paths = [_fetched(model, name.repository, str(part)) for part in part_files(Path(chosen))]
    return paths[0]


def find_cached(model: str, name: HubName, patterns: Sequence[str]) -> Path | None:
    """Return a cached model's folder or its GGUF file, without asking the hub; None: not cached.

    Args:
        model: the text in which the user named the model, to quote in errors.
        name: this text, parsed.
        patterns: patterns of the files that a folder needs.

    Raises:
        ModelLoadError: several cached files match the name.
    """
    folder = _cached_snapshot(name.repository, patterns)
    in_snapshot = [str(path.relative_to(folder)) for path in folder.rglob("*")] if folder else []
    files = [*_cached_files(name.repository), *in_snapshot]
    if name.file:
        chosen = str(first_part(Path(name.file)))
    elif name.quantization or _has_gguf_alone(files):
        chosen = _choose(model, name, list(dict.fromkeys(files)))
    else:
        return folder
    found = [_cached_file(model, name.repository, str(part)) for part in part_files(Path(chosen))]
    return found[0] if all(found) else None


def _cached_snapshot(repository: str, patterns: Sequence[str]) -> Path | None:
    """Return the folder of a repository in the hub library's cache; None: it is not cached."""
    import huggingface_hub  # late, because local folders need not wait half a second for it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=list(patterns), local_files_only=True
            )
        )
    except Exception:  # the hub library's errors have no common base class
        return None


def _cached_file(model: str, repository: str, file: str) -> Path | None:
    """Return a file of a repository in one of the caches; None: no cache has the file."""
    import huggingface_hub

    path = _folder(repository) / file
    if ".." in path.parts:
        raise ModelLoadError(f"model: {model!r}: {file!r:.100} is not a file name")
    cached = huggingface_hub.try_to_load_from_cache(repository, file)
    if isinstance(cached, str):
        return Path(cached)
    return path if path.is_file() else None


def _has_gguf_alone(files: Sequence[str]) -> bool:
    suffixes = {PurePosixPath(file).suffix.lower() for file in files}
    return _GGUF in suffixes and _SAFETENSORS not in suffixes


def _files_of(model: str, name: HubName) -> Sequence[str] | None:
    """List a repository's files, or its cached files if the hub cannot be reached.

    Returns None if the hub cannot be reached and no files are cached; `_snapshot` then reports why.

    Raises:
        ModelLoadError: the files are unknown, and the user named a quantization.
    """
    import huggingface_hub  # late, because local folders need not wait half a second for it

    try:
        return huggingface_hub.HfApi().list_repo_files(name.repository)
    # Every exception is caught: depending on the hub library's version, errors come from requests
    # or httpx, and have no common base class.
    except Exception as error:
        here = _cached_files(name.repository)
        if here or not name.quantization:
            return here or None
        raise _cannot_fetch(model, error) from error


def _cached_files(repository: str) -> list[str]:
    """List the complete GGUF files of a repository that are cached."""
    folder = _folder(repository)
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob(f"*{_GGUF}"))
        if all(part.is_file() for part in part_files(path))
    ]


def _choose(model: str, name: HubName, files: Sequence[str]) -> str:
    """Return the GGUF file that matches a model's name.

    Raises:
        ModelLoadError: no file or several files match.
    """
    ggufs = [file for file in files if PurePosixPath(file).suffix.lower() == _GGUF]
    models = [str(path) for path in list_models([Path(file) for file in ggufs])]
    found = models
    if name.quantization:
        wanted = re.compile(rf"(?:^|[-._/]){re.escape(name.quantization)}(?:[-.]|$)", re.IGNORECASE)
        found = [file for file in models if wanted.search(_stem(file))]
    if len(found) == 1:
        return found[0]
    known = sorted({kind for file in models if (kind := _quantization(file))})
    shown = ", ".join((known or models)[:_SHOWN_FILES])
    if found and name.quantization:
        several = ", ".join(found[:_SHOWN_FILES])
        problem = f"several files of {name.quantization}; name one with {_SCHEME}: {several}"
    elif name.quantization:
        problem = f"no {_GGUF} file of {name.quantization}; it has: {shown or 'none'}"
    else:
        problem = f"{_GGUF} files of several kinds; name one, as {name.repository}:KIND: {shown}"
    raise ModelLoadError(f"model: {model!r}: the hub's repository has {problem}")


def _stem(file: str) -> str:
    """Return a GGUF file's path without the suffix and the number of the part."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file, flags=re.IGNORECASE)


def _quantization(file: str) -> str | None:
    """Return the last name of a quantization in a file's name, or None if there is none."""
    words = re.findall(rf"(?:^|[-._/])({_QUANTIZATION.pattern})(?=[-.]|$)", _stem(file), re.I)
    return words[-1] if words else None


def _snapshot(model: str, repository: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(patterns)))
    except Exception as error:  # the hub library's errors have no common base class
        raise _cannot_fetch(model, error) from error


def _fetched(model: str, repository: str, file: str) -> Path:
    """Return a file of a repository from a cache; download the file if no cache has it."""
    cached = _cached_file(model, repository, file)
    if cached is not None:
        return cached
    path = _folder(repository) / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(path):
            if not path.exists():
                _download(repository, file, path)
    except Exception as error:  # the hub library's errors have no common base class
        raise _cannot_fetch(model, error) from error
    return path


def _download(repository: str, file: str, path: Path) -> None:
    """Download a file to ``path`` with a progress bar, resuming an interrupted download."""
    import huggingface_hub
    from huggingface_hub.file_download import http_get

    url = huggingface_hub.hf_hub_url(repository, file)
    found = huggingface_hub.get_hf_file_metadata(url)
    # The name of the unfinished file contains the digest of the whole content, so that a download
    # of other content is not resumed.
    part = path.with_name(f"{path.name}.{(found.etag or 'content')[:16]}{_PART_OF_FILE}")
    token = huggingface_hub.get_token()
    # The token is sent only to the hub; the addresses of other hosts carry signatures instead.
    needs_token = token is not None and found.location == url
    with part.open("r+b" if part.exists() else "w+b") as content:
        have = content.seek(0, os.SEEK_END)
        known = (file, repository, have, found.size)
        logger.info("fetching %s of %s: %s of %s bytes are here already", *known)
        if have != found.size:
            http_get(
                found.location,
                content,
                resume_size=have,
                headers={"authorization": f"Bearer {token}"} if needs_token else None,
                expected_size=found.size,
                displayed_filename=path.name,
            )
        size = content.seek(0, os.SEEK_END)
    if found.size is not None and size != found.size:
        part.unlink()
        raise OSError(f"{file}: got {size} of {found.size} bytes; try again")
    part.rename(path)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process on this machine downloads the file."""
    with path.with_name(path.name + ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _folder(repository: str) -> Path:
    try:
        return own_cache_folder("hub") / repository.replace("/", "--")
    except (CacheFolderError, OSError) as error:
        raise ModelLoadError(f"model: the cache cannot be used: {error}") from error


def _cannot_fetch(model: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"model: {model!r}: there is no such folder or file here, and it cannot be fetched "
        f"from the hub: {_reason(error)}"
    )


def _reason(error: Exception) -> str:
    """Return why a download failed and what helps, in one line."""
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache does not have it"
    if isinstance(error, errors.GatedRepoError):
        return "its owner must grant access (on its page), and HF_TOKEN must be yours"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or HF_TOKEN may not read it"
    lines = str(error).strip().splitlines()
    if found := _SYSTEM_ERROR.search(str(error)):
        return f"no connection ({found[1]}); a folder or GGUF file of this machine needs none"
    return lines[0] if lines else type(error).__name__
