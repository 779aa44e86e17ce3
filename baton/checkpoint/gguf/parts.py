"""GGUF parts: reads a model that llama.cpp's `gguf-split` divided into several files.

The first part has the metadata; every part has the number of parts and some tensors. Knows neither
the meaning of metadata nor the contents of tensors.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.api.errors import ModelLoadError
from baton.checkpoint.gguf.file import GgufFile, StoredTensor

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # words in names of files of image projectors or statistics
_MAX_PARTS = 10**5
# Younger files are not cached: two changes within one tick of the kernel's clock give a file equal
# times, so the second change would go unnoticed.
_YOUNG_NS = 2 * 10**9
_MOST_VALUES = 4096  # longest list that `read_places` keeps
_COUNT, _NUMBER, _NUM_TENSORS = "split.count", "split.no", "split.tensors.count"


def read_model(path: Path) -> GgufFile:
    """Return the header of a model's only file, or the joined headers of all of its parts.

    Args:
        path: the file, or any of the parts.

    Raises:
        ModelLoadError: a file is broken, a part is missing, or parts do not belong together.
    """
    path = first_part(path)
    first = GgufFile.read(path)
    count = first.metadata.get(_COUNT, 1)
    if not isinstance(count, int) or count <= 1:
        return first
    paths = part_files(path)
    if len(paths) != count:
        expected = _name("NAME", 1, count) if count < _MAX_PARTS else "otherwise"
        raise ModelLoadError(f"{path}: the first of {count} parts must be called {expected}")
    if first.metadata.get(_NUMBER) != 0:
        raise ModelLoadError(f"{path}: {_NUMBER}: must be 0 in the first of {count} parts")
    tensors: dict[str, StoredTensor] = dict(first.tensors)
    for number, part in enumerate(paths[1:], 1):
        if not part.exists():
            raise ModelLoadError(f"{part}: missing: {path.name} is the first of {count} parts")
        found = GgufFile.read(part)
        says = (found.metadata.get(_NUMBER), found.metadata.get(_COUNT))
        if says != (number, count):
            problem = f"part {says[0]!r:.20} of {says[1]!r:.20}, expected part {number} of {count}"
            raise ModelLoadError(f"{part}: {_NUMBER}: {problem}, counted from 0")
        if twice := tensors.keys() & found.tensors.keys():
            name = min(twice)
            raise ModelLoadError(f"{part}: {name}: also in {tensors[name].path.name}")
        tensors |= found.tensors
    expected = first.metadata.get(_NUM_TENSORS, len(tensors))
    if expected != len(tensors):
        problem = f"{expected!r:.20}, but the parts have {len(tensors)} tensors"
        raise ModelLoadError(f"{path}: {_NUM_TENSORS}: {problem}")
    return replace(first, tensors=tensors, parts=tuple(paths))


def read_places(path: Path) -> GgufFile:
    """Return the header as `read_model` does, but without long lists such as vocabularies.

    A process caches the headers of the last four models, as long as their files do not change.

    Raises:
        ModelLoadError: a file is broken, a part is missing, or parts do not belong together.
    """
    path = first_part(path)
    states = tuple(map(_state, part_files(path)))
    changed_ns = max(max(state[-2:], default=0) for state in states)
    if time.time_ns() - changed_ns < _YOUNG_NS:
        return _without_lists(path)
    return _known_places(path, states)


@functools.lru_cache(maxsize=4)
def _known_places(path: Path, _states: tuple[tuple[int, ...], ...]) -> GgufFile:
    """Read the headers of a model's files.

    ``_states`` is part of the cache's key, so that changed files are read again.
    """
    return _without_lists(path)


def _without_lists(path: Path) -> GgufFile:
    file = read_model(path)
    short = {
        key: value
        for key, value in file.metadata.items()
        if not isinstance(value, list) or len(value) <= _MOST_VALUES
    }
    return replace(file, metadata=short)


def _state(path: Path) -> tuple[int, ...]:
    """Return a file's identity, size and times, of which at least one changes with the file.

    Returns an empty tuple if the file is inaccessible.
    """
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def linked(path: Path) -> Path:
    """Return the direct target of a link, or a path that is no link.

    Only one link is followed, because files in the hub's cache are links to files whose names do
    not tell the number of the part.
    """
    try:
        return path.parent / path.readlink() if path.is_symlink() else path
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def first_part(path: Path) -> Path:
    """Return the path of the first part of the model that a part belongs to; keep other paths."""
    found = _PART.fullmatch(path.name)
    return path if found is None else path.with_name(_name(found["stem"], 1, int(found["count"])))


def only_first_parts(paths: Sequence[Path]) -> list[Path]:
    """Replace all parts of a model by its first part, even if that part is missing."""
    return sorted({first_part(path) for path in paths})


def list_models(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are models; of a model in several parts, return only the first part."""
    firsts = only_first_parts(paths)
    return [path for path in firsts if not any(word in str(path).lower() for word in _NO_MODELS)]


def part_files(path: Path) -> list[Path]:
    """Return all parts of the model that a file belongs to, or the file alone."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    return [path.with_name(_name(found["stem"], number, count)) for number in range(1, count + 1)]


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"
