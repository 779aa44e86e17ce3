"""Cache folder: keeps the user's cached files in folders that no other user can write to.

Another user who could write there could run code in Baton's processes or change model files.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheFolderError(Exception):
    """A cache folder is unusable; the message is one line that says why."""


def cache_folder(name: str) -> Path:
    """Return the folder ``name`` for cached files, in ``BATON_CACHE`` or `~/.cache/baton`."""
    cache = os.environ.get("BATON_CACHE")
    try:
        return (Path(cache) if cache else Path.home() / ".cache" / "baton") / name
    except RuntimeError as error:  # the user has no home folder, for example in a container
        raise CacheFolderError("BATON_CACHE: must be given: this user has no home") from error


def own_cache_folder(name: str) -> Path:
    """Return the folder ``name`` for cached files; create it if missing, for this user only."""
    folder = cache_folder(name)
    os.close(open_own_folder(folder))
    return folder


def open_own_folder(folder: Path) -> int:
    """Return the descriptor of a folder that only this user can write to; create it if missing.

    Raises:
        CacheFolderError: the folder belongs to another user.
        OSError: the folder cannot be created or opened.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
        # Files of other users may remain in the folder, so readers check each file's owner, too.
        os.fchmod(descriptor, 0o700)
        found = os.fstat(descriptor)
    if not is_own(found):
        os.close(descriptor)
        owner = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise CacheFolderError(f"{folder}: must belong to user {os.geteuid()} alone, got {owner}")
    return descriptor


def is_own(found: os.stat_result) -> bool:
    """Return whether a file or folder is this user's or root's, and not writable for others."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE
