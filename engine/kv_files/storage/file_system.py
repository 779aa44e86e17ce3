"""FileSystem: the few operations on files that a folder's storage needs. Tests replace this class.

Every method may raise OSError. Refuses to know: runs, blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.kv_files.storage.storage import FoundFile

_MOST_PARTS = 1024  # maximum number of buffers in one system call (IOV_MAX)


class FileSystem:
    """Operations on the files of one machine."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, for this user only, and missing folders above; do nothing if it exists.

        Folders above get the permissions that the process gives by default.
        """
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def list_folders(self, path: Path) -> dict[str, float]:
        """Return the time of change of each subfolder, in seconds since 1970, by name.

        Leaves out folders that another process removes meanwhile. The result is empty if the folder
        is missing.
        """
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir():
                        found[entry.name] = entry.stat().st_mtime
        return found

    def list_files(self, path: Path) -> list[FoundFile]:
        """Return the regular files in a folder; the time of use is the time of change.

        Leaves out files that another process removes meanwhile. The result is empty if the folder
        is missing.
        """
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    found.append(FoundFile(entry.name, stat.st_size, stat.st_mtime))
        return found

    def open(self, path: Path) -> int:
        """Return a descriptor for reading a file."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def is_private(self, descriptor: int) -> bool:
        """Return whether this user or root owns a file, and other users have no access to it.

        The file's group may have access, because shared volumes give their files to a group.
        """
        stat = os.fstat(descriptor)
        return stat.st_uid in (os.geteuid(), 0) and not stat.st_mode & 0o007

    def read_into(self, descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill memory with a file's bytes from an offset on; return how many bytes were read."""
        num_read = 0
        left = [part for part in parts if part.nbytes]
        while left:
            num_bytes = os.preadv(descriptor, left[:_MOST_PARTS], offset + num_read)
            if not num_bytes:
                break
            num_read += num_bytes
            while left and num_bytes >= left[0].nbytes:
                num_bytes -= left.pop(0).nbytes
            if num_bytes:
                left[0] = left[0][num_bytes:]
        return num_read

    def read_soon(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Advise the system to read a part of a file ahead; a failure is ignored."""
        with contextlib.suppress(AttributeError, OSError):  # macOS has no such call
            os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, for this user only."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left.nbytes:
                    left = left[file.write(left) :]

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file atomically; replace a file that has the new name."""
        path.replace(target)

    def link(self, path: Path, target: Path) -> None:
        """Give a file a second name; raise FileExistsError if the name is taken."""
        target.hardlink_to(path)

    def remove(self, path: Path) -> None:
        """Remove a file; do nothing if it is gone."""
        path.unlink(missing_ok=True)

    def used_at(self, path: Path) -> float | None:
        """Return a file's time of change, in seconds since 1970; None: the file is gone."""
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return None

    def touch(self, path: Path) -> None:
        """Set a file's time of change to now; do nothing if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
