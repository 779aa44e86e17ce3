"""Weights cache: files of packed weights in the user's cache, mapped by all processes of a machine.

    | bytes of all tensors | index (JSON) | trailer |

A file's name contains a key (a digest of the checkpoint's files and of how they are packed) and the
id of the boot in which a process last checked all bytes. A process that finds a file of an earlier
boot first checks all bytes, because the end of the file may be missing on the disk after a power
cut. A finished file is renamed into place and never written again. A file may be removed at any
time: processes that have mapped the file keep its pages. Refuses to know: tensors, how weights are
packed, GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoint.cache_folder import (
    CacheFolderError,
    cache_folder,
    is_own,
    open_own_folder,
)

logger = logging.getLogger(__name__)

FOLDER = "weights"
DEFAULT_LIMIT_BYTES = 20 * 2**30
LEAST_BYTES = 16 * 2**20  # smaller checkpoints are packed anew, which is fast
ALIGNMENT = 64  # each tensor begins at a multiple of 64 bytes
_SPARE_DISK_BYTES = 2**30  # bytes of the disk that stay free for other programs
_MAX_AGE_S = 30 * 24 * 3600.0
_MAX_NEW_AGE_S = 3600.0  # seconds after which an unfinished file is removed
_LOCK_TIMEOUT_S = 100.0  # after this time without the lock, a node packs the weights itself
_LOCK_POLL_S = 0.02
# Younger files are not cached: two changes within one tick of the kernel's clock give a file equal
# times, so the second change would go unnoticed.
_YOUNG_NS = 2 * 10**9
_PIECE_BYTES = 8 * 2**20  # bytes per write; large writes make file systems use huge pages
_MAGIC = b"baton weights 1\n"
_TRAILER = struct.Struct("<QQ32s32s16s")  # sizes of tensors and index, digests of both, magic
_MAX_INDEX_BYTES = 64 * 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"  # boot id on systems that have none
_SUFFIX, _LOCK, _NEW = ".weights", ".lock", ".new"
_KEY_CHARS = 32
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,12}|unknown)\.weights")


class WeightsCacheError(Exception):
    """A file of packed weights cannot be used or written; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of packed weights, mapped for reading only.

    Attributes:
        content: all bytes of the file.
        index: JSON that describes the tensors.
        data_bytes: size in bytes of the tensors, which are the first part of the file.
    """

    content: mmap.mmap
    index: Mapping[str, Any]
    data_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """The folder with the files of packed weights.

    Attributes:
        limit_bytes: maximum size of all files together, in bytes; beyond this, the least recently
            used files are removed.
        least_bytes: size in bytes of the smallest checkpoint whose packed weights are kept.
    """

    limit_bytes: int = DEFAULT_LIMIT_BYTES
    least_bytes: int = LEAST_BYTES

    def takes(self, checkpoint_bytes: int) -> bool:
        """Return whether packed weights of a checkpoint of this size are kept."""
        return self.least_bytes <= checkpoint_bytes and self.limit_bytes > 0

    @contextmanager
    def hold(self, sources: Sequence[Path], packing: str) -> Iterator[CacheEntry]:
        """Lock the entry of a checkpoint, so that one process packs it while others wait.

        Args:
            sources: the checkpoint's files.
            packing: text with everything that decides how the checkpoint is packed.

        Raises:
            WeightsCacheError: the folder is unusable, or the wait takes too long.
        """
        identity = identify_files(sources)
        key = hashlib.sha256(f"{identity} {packing}".encode()).hexdigest()[:_KEY_CHARS]
        try:
            folder = cache_folder(FOLDER)
            descriptor = open_own_folder(folder)
        except (CacheFolderError, OSError) as error:
            raise WeightsCacheError(str(error)) from error
        try:
            lock = _lock(descriptor, key)
            try:
                yield CacheEntry(folder, descriptor, key, self.limit_bytes, sources, identity)
            finally:
                os.close(lock)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The cache's entry for the packed weights of one checkpoint, locked by this process."""

    folder: Path
    descriptor: int  # descriptor of the folder
    key: str
    limit_bytes: int
    sources: Sequence[Path]
    identity: str  # digest of the sources' state before they are read

    def open(self) -> PackedFile | None:
        """Map the entry's file; remove a damaged file; return None if no usable file is left."""
        boot = _boot()
        own = self._name(boot)
        for name in sorted(self._names(), key=lambda one: one != own):
            try:
                found = _open(self.descriptor, name, whole=name != own or boot == _UNKNOWN)
                self._rename(name, own)
                os.utime(own, dir_fd=self.descriptor)
            except (WeightsCacheError, OSError) as error:
                logger.warning("packed weights %s are packed again: %s", self.folder / name, error)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)
            else:
                return found
        return None

    def write(self, tensors: Iterable[tuple[int, memoryview]], index: Mapping[str, Any]) -> None:
        """Write the entry's file; remove the least recently used files if the cache is full.

        Args:
            tensors: position in the file and bytes of each tensor, sorted by position.
            index: JSON object that describes the tensors.

        Raises:
            WeightsCacheError: the file has no room or cannot be written, or the checkpoint
                changed while it was packed.
        """
        tensors = list(tensors)
        size = tensors[-1][0] + tensors[-1][1].nbytes if tensors else 0
        if size > self.limit_bytes:
            limit = self.limit_bytes / 2**30
            raise WeightsCacheError(f"{size / 2**30:.1f} GiB exceed --weights-cache {limit:g} GiB")
        # The name is unique, because two processes may write if somebody removes the lock's file.
        new = f"{self.key}-{secrets.token_hex(4)}{_NEW}"
        try:
            self._make_room(size)
            free = os.fstatvfs(self.descriptor)
            left = free.f_bavail * free.f_frsize - size
            if left < _SPARE_DISK_BYTES:
                raise WeightsCacheError(f"{self.folder}: too little disk space is left for them")
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(new, flags, 0o600, dir_fd=self.descriptor)
            try:
                _write(file, tensors, json.dumps(index).encode())
            finally:
                os.close(file)
            if identify_files(self.sources) != self.identity:
                raise WeightsCacheError("the checkpoint was changed while it was read")
            self._rename(new, self._name(_boot()))
        except OSError as error:
            raise WeightsCacheError(f"{self.folder}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self.descriptor)

    def _name(self, boot: str) -> str:
        return f"{self.key}-{boot}{_SUFFIX}"

    def _names(self) -> Iterator[str]:
        """Yield the names of this entry's files."""
        for name in os.listdir(self.descriptor):  # noqa: PTH208 (by its descriptor)
            match = _NAME.fullmatch(name)
            if match is not None and match[1] == self.key:
                yield name

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def _make_room(self, size: int) -> None:
        """Remove files that are too old, and the least recently used files, to make room.

        Args:
            size: size of the file to write, in bytes.
        """
        now, files = time.time(), list[tuple[float, int, str]]()
        for name in os.listdir(self.descriptor):  # noqa: PTH208 (by its descriptor)
            with contextlib.suppress(OSError):  # another process removed the file
                found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
                age = now - found.st_mtime
                if name.endswith(_NEW) and age > _MAX_NEW_AGE_S:
                    os.unlink(name, dir_fd=self.descriptor)
                elif name.endswith(_SUFFIX):
                    files.append((age, found.st_size, name))
        room = self.limit_bytes - size
        for age, num_bytes, name in sorted(files):  # most recently used first
            room -= num_bytes
            if room < 0 or age > _MAX_AGE_S:
                logger.info("packed weights %s are removed: %.0f MiB", name, num_bytes / 2**20)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)
                    os.unlink(f"{name[:_KEY_CHARS]}{_LOCK}", dir_fd=self.descriptor)


def identify_files(paths: Sequence[Path]) -> str:
    """Return a digest that changes when one of the files is written to or replaced.

    The digest is made of device, inode, size and times of each file.

    Raises:
        WeightsCacheError: a file is inaccessible or was changed a moment ago.
    """
    digest, now = hashlib.sha256(), time.time_ns()
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise WeightsCacheError(f"{path}: {error.strerror}") from error
        if now - max(found.st_mtime_ns, found.st_ctime_ns) < _YOUNG_NS:
            raise WeightsCacheError(f"{path} changed a moment ago")
        place = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        digest.update(repr(place).encode())
    return digest.hexdigest()


def used_bytes() -> int:
    """Return the size of all files of packed weights in bytes; 0 if there is no folder of them."""
    try:
        files = list(cache_folder(FOLDER).glob(f"*{_SUFFIX}"))
        return sum(path.stat().st_size for path in files)
    except (CacheFolderError, OSError):
        return 0


def _boot() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").replace("-", "")[:12]
    except OSError:
        return _UNKNOWN


def _lock(folder: int, key: str) -> int:
    """Wait for the lock of a key; return the descriptor that holds the lock.

    Raises:
        WeightsCacheError: the lock's file cannot be opened, or the wait takes too long.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            lock = os.open(key + _LOCK, flags, 0o600, dir_fd=folder)
        except OSError as error:
            raise WeightsCacheError(f"{key}{_LOCK}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(key + _LOCK, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(os.fstat(lock), here):
                return lock
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        if time.monotonic() > deadline:
            raise WeightsCacheError(f"another process has packed them for {_LOCK_TIMEOUT_S:g} s")
        time.sleep(_LOCK_POLL_S)


def _write(file: int, tensors: Sequence[tuple[int, memoryview]], index: bytes) -> None:
    """Write tensors, index and trailer to an open file; raises OSError."""
    digest, pieces = hashlib.sha256(), bytearray()
    at = 0
    for begin, content in tensors:
        pieces += bytes(begin - at)
        for start in range(0, content.nbytes, _PIECE_BYTES):
            pieces += content[start : start + _PIECE_BYTES]
            if len(pieces) >= _PIECE_BYTES:
                digest.update(pieces)
                _write_all(file, pieces)
                pieces = bytearray()
        at = begin + content.nbytes
    digest.update(pieces)
    trailer = _TRAILER.pack(at, len(index), digest.digest(), hashlib.sha256(index).digest(), _MAGIC)
    _write_all(file, bytes(pieces) + index + trailer)


def _write_all(file: int, content: bytes | bytearray) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _open(folder: int, name: str, *, whole: bool) -> PackedFile:
    """Map a file of this user, and check its contents; raises WeightsCacheError or OSError.

    Args:
        whole: whether to check all bytes, or only the index.
    """
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not is_own(found):
            raise WeightsCacheError("another user can write to the file")
        if found.st_size < _TRAILER.size:
            raise WeightsCacheError("the file is too short")
        content = mmap.mmap(file, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(file)
    size = found.st_size - _TRAILER.size
    data_bytes, index_bytes, data_digest, index_digest, magic = _TRAILER.unpack_from(content, size)
    if magic != _MAGIC or data_bytes + index_bytes != size or index_bytes > _MAX_INDEX_BYTES:
        raise WeightsCacheError("the file's end is damaged")
    index = content[data_bytes:size]
    if hashlib.sha256(index).digest() != index_digest:
        raise WeightsCacheError("the file's index is damaged")
    if whole:
        with memoryview(content) as everything, everything[:data_bytes] as data:
            if hashlib.sha256(data).digest() != data_digest:
                raise WeightsCacheError("the file's content is damaged")
    return PackedFile(content, json.loads(index), data_bytes)
