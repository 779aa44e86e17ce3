"""The user's cache: folders in it that nobody else can write, looked at by descriptor.

Who could put a file there could run code in our processes, or change what a model is told.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheFolderError(Exception):
    """A cache folder cannot be used; the message is one line that says why."""


def cache_folder(name: str) -> Path:
    """Return the folder of a kind of cached files, in ``BATON_CACHE`` or `~/.cache/baton`."""
    cache = os.environ.get("BATON_CACHE")
    try:
        return (Path(cache) if cache else Path.home() / ".cache" / "baton") / name
    except RuntimeError as error:  # a user without an entry, as containers have
        raise CacheFolderError("BATON_CACHE: a folder where there is no home, got none") from error


def own_cache_folder(name: str) -> Path:
    """Return :func:`cache_folder`, made if it is not there, writable by nobody else."""
    folder = cache_folder(name)
    os.close(open_own_folder(folder))
    return folder


def open_own_folder(folder: Path) -> int:
    """Open the folder and return its descriptor; make it if absent, writable by nobody else.

    Raises CacheFolderError, or OSError where it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
        os.fchmod(descriptor, 0o700)  # what others have put there is found out by its owner
        found = os.fstat(descriptor)
    if not is_own(found):
        os.close(descriptor)
        owner = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise CacheFolderError(f"{folder}: must be of user {os.geteuid()} alone, got {owner}")
    return descriptor


def is_own(found: os.stat_result) -> bool:
    """Say whether a file or folder is ours (or root's), and nobody else can write it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE
