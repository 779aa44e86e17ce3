"""Storage and StoredFile: what a `RunStore` needs of the place that keeps its files.

A path is IDENTITY/FIRST TWO DIGITS/NAME. Several nodes may use the same place. Every method may
raise OSError. Implementations refuse to know: runs, blocks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class UnreadableFileError(OSError):
    """A file cannot be read, for a reason that other files of the storage do not share."""


class UnreachableError(OSError):
    """A file could not be read, for a reason that concerns all files, such as a server's failure.

    The error does not show that the file is gone or broken.
    """


@contextlib.contextmanager
def raise_if_unreachable(problem: OSError) -> Iterator[None]:
    """Raise UnreachableError with the text of ``problem`` if the code in the context fails, too.

    Args:
        problem: the error of a read. The code in the context is a request that needs no file.
    """
    try:
        yield
    except OSError:
        raise UnreachableError(problem.errno, problem.strerror, problem.filename) from problem


class FoundFile(NamedTuple):
    """A file of a folder; ``used_at`` is its last known use, in seconds since 1970."""

    name: str
    num_bytes: int
    used_at: float


class Listing(NamedTuple):
    """All files of one folder (``IDENTITY/FIRST TWO DIGITS``).

    Attributes:
        began_at: when the listing began, in seconds since 1970; files that were written later may
            be missing.
    """

    folder: str
    files: Sequence[FoundFile]
    began_at: float = math.inf


@dataclass(frozen=True, slots=True)
class StorageTerms:
    """Options with which each rank opens its storage.

    Attributes:
        location: a folder, or ``s3://BUCKET/PREFIX``.
        secret_file: file with the key of the digests; empty: a folder has a key of its own.
        timeout_s: longest time of one request to a server.
    """

    location: str
    secret_file: str = ""
    timeout_s: float = 2.0


class StoredFile(Protocol):
    """A file that is open for reading."""

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill memory with the file's bytes from an offset on; return how many bytes were read.

        Raises FileNotFoundError if the file was removed or replaced meanwhile, UnreadableFileError
        if only this file cannot be read, and UnreachableError if no file can be read now.
        """

    def read_soon(self, offset: int, num_bytes: int) -> None:
        """Announce that a part of the file will be read; a storage may fetch the part ahead."""

    def note_use(self) -> None:
        """Let other nodes, and this node after a restart, know that the file was used now.

        A storage whose operations are slow does this at the next `Storage.list_changes`.
        """

    def close(self) -> None:
        """Close the file."""


class Storage(Protocol):
    """A place with files that never change once they have their name.

    Attributes:
        secret: key of the digests of all files.
        chunk_bytes: how many bytes of a file to read at once.
        are_objects: whether the files are objects on a server.
    """

    secret: bytes
    chunk_bytes: int
    are_objects: bool

    def list_changes(self) -> Iterator[Listing]:
        """Yield the folders that may have changed since the last call.

        A folder that was removed is yielded without files. A call may end before all folders are
        listed; the next call then continues.
        """

    def open(self, path: str) -> StoredFile:
        """Open a file for reading.

        Raises FileNotFoundError, UnreadableFileError or UnreachableError, here or at the first
        read.
        """

    def write(
        self, path: str, parts: Sequence[bytes | memoryview], is_valid: Callable[[], bool]
    ) -> bool:
        """Write a file, in place of any file with this name; return whether the file was written.

        Args:
            is_valid: called once all bytes were read. If `is_valid` returns False, no file is
                written.
        """

    def remove(self, path: str, unless_used_after: float | None = None) -> float | None:
        """Remove a file, and return None; do nothing if it is gone.

        Args:
            unless_used_after: time in seconds since 1970. If the storage can tell without a listing
                that some node has used the file later, it keeps the file, and returns the time of
                this use.
        """

    def close(self) -> None:
        """Stop looking for changes; call on the thread that calls `list_changes`."""
