"""FolderStorage: files in a folder of this machine, or of a file system that machines share.

    FOLDER/secret                               key of all digests, made by the first node
    FOLDER/IDENTITY/FIRST TWO DIGITS/NAME.kv    one run of blocks (`run_file.py`)

A file gets its name only when it is complete, and never changes afterwards, so nodes need no lock.
A file's time of change is the time of its last use. Running nodes write a removed key again, and
use a key that has replaced theirs (ADR 0146). So all nodes have the same key, and no node removes
another node's good files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.api.errors import ConfigError
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.folder_watch import FolderWatch
from engine.kv_files.storage.secret import (
    SECRET,
    UNFINISHED,
    open_folder_secret,
    read_secret,
    read_secret_file,
)
from engine.kv_files.storage.storage import (
    FoundFile,
    Listing,
    StorageTerms,
    UnreachableError,
    UnreadableFileError,
    raise_if_unreachable,
)

logger = logging.getLogger(__name__)

# Names of folders with KV, see `RunStore.identity` and `RankStores.identity`. Others are left out:
# for example, only root may list the folder `lost+found` of a mounted file system.
_IDENTITY = re.compile(r"[0-9a-f]+(\.\d+)?(-\d+)?", re.ASCII)
# Age in seconds after which an unfinished file counts as left by a killed node, and is removed.
_ABANDONED_S = 600.0
# Clocks of file systems are coarse. So a folder is listed again if it was changed less than this
# many seconds before its last listing.
_SETTLED_S = 1.0
# Seconds between two listings of all folders, because changes by other machines are not reported.
_SCAN_ALL_S = 30.0
# Errors of one file: a file of another user, a symbolic link, or a folder with the name of a run.
_ERRORS_OF_FILE = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR})
# Errors of the machine's network or of a file server
_ERRORS_OF_SERVER = frozenset(
    {
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN),
        *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN),
        *(errno.EPIPE, errno.ETIMEDOUT),
    }
)


class FolderStorage:
    """Files in a folder, which is made if it is missing.

    Args:
        terms: the folder, and where its key is.
        files: does all operations on files.

    Attributes:
        secret, chunk_bytes, are_objects: see `Storage`.

    Raises ConfigError if the folder or the key cannot be used.
    """

    chunk_bytes, are_objects = 2**21, False

    def __init__(self, terms: StorageTerms, files: FileSystem | None = None) -> None:
        self._folder, self._files = Path(terms.location).expanduser(), files or FileSystem()
        self._read_at: dict[str, float] = {}  # folders, and the times of change that were seen
        self._watch, self._scan_all_at = FolderWatch(), 0.0
        self._has_own_secret = not terms.secret_file
        self._is_secret_new = False  # whether files that were refused with the old key may be good
        try:
            self._files.make_folder(self._folder)
            self.secret = (
                read_secret_file(terms.secret_file, self._files)
                if terms.secret_file
                else open_folder_secret(self._folder, self._files)
            )
        except OSError as error:
            raise ConfigError(
                f"kv_files: {self._folder}: cannot be used: {error.strerror}"
            ) from error

    def open(self, path: str) -> FolderFile:
        return FolderFile(self._folder, path, self._files)

    def write(
        self, path: str, parts: Sequence[bytes | memoryview], is_valid: Callable[[], bool]
    ) -> bool:
        target = self._folder / path
        for folder in (self._folder, target.parent.parent, target.parent):
            self._files.make_folder(folder)  # one by one, so that each folder is private
        if self._follow_secret():
            return False  # the digests were made with the old key
        # Nodes in containers have equal process ids.
        new = target.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
        try:
            self._files.write_new(new, parts)
            if not is_valid():
                return False
            self._files.rename(new, target)
        finally:
            self._files.remove(new)
        return True

    def remove(self, path: str, unless_used_after: float | None = None) -> float | None:
        target = self._folder / path
        if unless_used_after is not None:
            used_at = self._files.used_at(target)
            if used_at is not None and used_at > unless_used_after:
                return used_at
        if self._has_own_secret:
            # A file that looks damaged may have been written with a new key. A missing key is not
            # written here, because on a full disk removing must still work.
            with contextlib.suppress(FileNotFoundError):
                if self._take_secret(read_secret(self._folder / SECRET, self._files)):
                    return None
        self._files.remove(target)
        return None

    def _follow_secret(self) -> bool:
        """Return whether the folder's key was replaced; write the key if it was removed."""
        if not self._has_own_secret:
            return False
        return self._take_secret(open_folder_secret(self._folder, self._files, self.secret))

    def _take_secret(self, found: bytes) -> bool:
        """Use a key that was found in the folder from now on; return whether it is a new one."""
        if found == self.secret:
            return False
        self.secret, self._is_secret_new, self._scan_all_at = found, True, 0.0
        logger.warning(
            "kv_files: %s was replaced; this node uses the new key from now on, and cannot read "
            "the files from before",
            self._folder / SECRET,
        )
        return True

    def close(self) -> None:
        self._watch.close()

    # ------------------------------------------------------------------ listing

    def list_changes(self) -> Iterator[Listing]:
        changed, now = self._watch.take_changed(), time.monotonic()
        are_runs = changed is not None and all(folder.count("/") == 1 for folder in changed)
        if changed is None or not are_runs or now >= self._scan_all_at:
            self._scan_all_at = now + _SCAN_ALL_S
            yield from self._list_all()
            return
        for folder in changed:
            yield self._list_folder(folder)

    def _list_all(self) -> Iterator[Listing]:
        """List all folders that were changed, and watch all folders from now on."""
        with contextlib.suppress(OSError):  # the folder is gone, or its disk is full
            self._follow_secret()
        if self._is_secret_new:
            self._is_secret_new, self._read_at = False, dict.fromkeys(self._read_at, -1.0)
        seen = set()
        self._watch.watch_folder(self._folder, "")
        for identity in filter(_IDENTITY.fullmatch, self._files.list_folders(self._folder)):
            self._watch.watch_folder(self._folder / identity, identity)
            found = self._files.list_folders(self._folder / identity)
            for name, changed_at in found.items():
                folder = f"{identity}/{name}"
                seen.add(folder)
                if self._read_at.get(folder) != changed_at:
                    self._watch.watch_folder(self._folder / folder, folder)
                    is_settled = time.time() - changed_at > _SETTLED_S
                    yield self._list_folder(folder)
                    self._read_at[folder] = changed_at if is_settled else -1.0
        for folder in self._read_at.keys() - seen:
            del self._read_at[folder]
            yield Listing(folder, ())

    def _list_folder(self, folder: str) -> Listing:
        found: list[FoundFile] = []
        for file in self._files.list_files(self._folder / folder):
            if not file.name.startswith(UNFINISHED):
                found.append(file)
            elif time.time() - file.used_at > _ABANDONED_S:
                self._files.remove(self._folder / folder / file.name)
        return Listing(folder, found)


class FolderFile:
    """An open file of a folder; a `StoredFile`."""

    def __init__(self, folder: Path, path: str, files: FileSystem) -> None:
        self._folder, self._path, self._files = folder, folder / path, files
        with self._name_errors():
            self._descriptor = files.open(self._path)

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> int:
        with self._name_errors():
            return self._files.read_into(self._descriptor, offset, parts)

    def read_soon(self, offset: int, num_bytes: int) -> None:
        self._files.read_soon(self._descriptor, offset, num_bytes)

    def note_use(self) -> None:
        self._files.touch(self._path)

    def close(self) -> None:
        self._files.close(self._descriptor)

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Replace an error by UnreadableFileError or UnreachableError, if one of them fits.

        A file server that is down may cause the same error as a bad sector. The folder can be
        listed in the second case only.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _ERRORS_OF_FILE:
                raise UnreadableFileError(error.errno, error.strerror, error.filename) from error
            if error.errno in _ERRORS_OF_SERVER:
                raise UnreachableError(error.errno, error.strerror, error.filename) from error
            with raise_if_unreachable(error):
                self._files.list_folders(self._folder)
            raise
