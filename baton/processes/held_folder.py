"""HeldFolder: a temporary folder that the next process removes if this one is killed.

A process that ends removes its folders. One that is killed cannot, so each folder is locked
(flock) by its living owner, and whoever makes a folder first removes those without a lock.
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
    """Make a folder that only this user can open, and hold it until `close`.

    First removes folders of this user with the same prefix whose owners have ended.

    Args:
        prefix: beginning of the name; each kind of folder needs a prefix of its own.
        parent: where the folder is made; None: in the system's folder for temporary files.

    Attributes:
        path: the folder.

    Raises:
        OSError: no folder can be made there.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_abandoned(prefix, parent)
        self.path, self._descriptor = _make(prefix, parent)

    def close(self) -> None:
        """Remove the folder and all that is in it; harmless when closed already."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self) -> None:
        """Let go of the folder and keep it until the next one with its prefix is made."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def abandoned_folders(prefix: str) -> list[Path]:
    """Return this user's folders with a prefix whose owners have ended, in the system's folder."""
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
        except OSError:  # no descriptor is left
            Path(path).rmdir()
            raise
        if descriptor is not None:
            return Path(path), descriptor
        # Another process took the new folder for an abandoned one before it was locked.
    raise BlockingIOError(f"each new folder in {parent} was removed at once")


def _lock(path: str) -> int | None:
    """Return a descriptor that holds a folder's lock; None if it is locked, gone or another's."""
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
    """Remove this user's folders that nobody holds; leave those that cannot be removed."""
    for path in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            descriptor = _lock(str(path))
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
