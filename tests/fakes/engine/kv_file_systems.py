"""File systems for the file tier that fail or stand still when a test says so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.kv_files.storage.file_system import FileSystem


class TroubledFiles(FileSystem):
    """Files of this machine with faults.

    Attributes:
        write_error: number of the error of writes, also of times; 0: none.
        read_error: number of the error of reads; 0: none.
        list_error: number of the error of listing folders; 0: none.
        gate: while this event is unset, reads of blocks stand still.
        stands: set once a read stands still.
    """

    def __init__(self) -> None:
        self.write_error = self.read_error = self.list_error = 0
        self.gate = threading.Event()
        self.gate.set()
        self.stands = threading.Event()

    def list_folders(self, path: Path) -> dict[str, float]:
        if self.list_error:
            raise OSError(self.list_error, os.strerror(self.list_error))
        return super().list_folders(path)

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        super().write_new(path, parts)

    def touch(self, path: Path) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        super().touch(path)

    def read_into(self, descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        if offset and not self.gate.is_set():
            self.stands.set()
            assert self.gate.wait(60), "the test opens the gate"
        return super().read_into(descriptor, offset, parts)


class CountingFiles(FileSystem):
    """Files of this machine; ``num_opened`` counts how often a file was opened for reading."""

    num_opened = 0

    def open(self, path: Path) -> int:
        self.num_opened += 1
        return super().open(path)


class VanishingFiles(FileSystem):
    """Files of this machine that another process removes as soon as they have been read."""

    def close(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        super().close(descriptor)
        if path.suffix == ".kv":
            path.unlink()


class ForbiddingFiles(FileSystem):
    """Files of this machine; listing the folder `lost+found` fails, as for users except root."""

    def list_folders(self, path: Path) -> dict[str, float]:
        if path.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().list_folders(path)


DISK_FULL, READ_ERROR = errno.ENOSPC, errno.EIO
