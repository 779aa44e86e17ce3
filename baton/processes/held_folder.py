"""HeldFolder: a temporary folder that is removed even if its process is killed, though later.

A process removes its folders when it ends. A killed process cannot do this. So each process holds a
lock (flock) on its folders, and before a process makes a folder, it removes all folders that are
not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

_MAX_TRIES = 10


class HeldFolder:
    """A temporary folder that only this user can open, locked until `close`.

    Before the folder is made, this user's folders with the same prefix are removed if their
    processes have ended.

    Args:
        prefix: beginning of the folder's name, which must be used for only one kind of folder.
        parent: folder in which to make the folder; None: the system's folder for temporary files.

    Attributes:
        path: path of the folder.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_abandoned(prefix, parent)
        self.path, self._descriptor = _make(prefix, parent)

    def close(self) -> None:
        """Remove the folder with its contents; do nothing if this was done before."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self) -> None:
        """Unlock the folder, which stays until the next folder with the same prefix is made."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def abandoned_folders(prefix: str) -> list[Path]:
    """Return this user's unlocked folders with a prefix in the system's temporary folder."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(str(path))
            if descriptor is not None:
                os.close(descriptor)
                found.append(path)
    return found


def _make(prefix: str, parent: str) -> tuple[Path, int]:
    """Return a new folder and a descriptor that holds its lock."""
    for _ in range(_MAX_TRIES):
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            descriptor = _lock(path)
        except OSError:  # without a descriptor
            Path(path).rmdir()
            raise
        if descriptor is not None:
            return Path(path), descriptor
        # Another process removed the new folder as abandoned, before it was locked.
    raise BlockingIOError(f"each new folder in {parent} was removed at once")


def _lock(path: str) -> int | None:
    """Lock a folder and return the descriptor; None if it is locked, gone or another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, here = os.fstat(descriptor), Path(path).lstat()
        if found.st_uid == os.geteuid() and os.path.samestat(found, here):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_abandoned(prefix: str, parent: str) -> None:
    """Remove this user's unlocked folders with a prefix, and ignore errors."""
    for path in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(str(path))
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
