"""ObjectStorage: files as objects of a server with the API of S3, by the library obstore.

    s3://BUCKET/PREFIX/IDENTITY/FIRST TWO DIGITS/NAME.kv         a run of blocks
    s3://BUCKET/PREFIX/IDENTITY/FIRST TWO DIGITS/NAME.kv.used    empty; its time is the last use

An object becomes visible only when it is complete. Whoever can write to the bucket could also
change a key in the bucket, so the key of the digests comes from a file of the node. Nodes find
objects by listing them, a few pages per call. Refuses to know: runs, blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from baton.api.errors import ConfigError
from engine.kv_files.storage.file_system import FileSystem
from engine.kv_files.storage.secret import read_secret_file
from engine.kv_files.storage.storage import (
    FoundFile,
    Listing,
    StorageTerms,
    UnreachableError,
    raise_if_unreachable,
)

try:
    import obstore
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
    from obstore.store import S3Store
except ImportError as error:
    raise ConfigError("kv_files: s3:// needs obstore; pip install 'baton-serve[s3]'") from error

logger = logging.getLogger(__name__)

USED = ".used"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# Listing: objects per request, requests per call, seconds until the next listing, and the maximum
# number of objects, which keeps a large bucket from filling the node's memory.
_PAGE, _PAGES_PER_CALL, LIST_EVERY_S, MOST_OBJECTS = 1000, 10, 15.0, 400_000
# Bytes at an object's start that are read when it is opened; most runs' headers are not longer.
_HEAD_BYTES = 2**16
# A chunk is read by this many requests at a time, because one request is slower than the network.
_NUM_REQUESTS, _REQUEST_BYTES = 4, 2**22
# The library returns an answer in pieces of about this size, so that an answer without an end,
# which a faulty server may send, is noticed early.
_PIECE_BYTES = 2**18
# Larger runs are sent in parts of this size, so that the node does not copy the whole run at once.
_PART_BYTES, _WRITE_TIMEOUT_S = 2**23, 30.0
# A node writes the marker of an object at most once in this many seconds.
NOTE_USE_S = 3600.0
# Maximum number of markers that wait, and of markers that one call of `list_changes` writes.
_MOST_USES, _USES_PER_CALL = 1024, 16
# Markers without an object are removed after this many seconds, at most this many per call.
_ORPHAN_S, _MOST_ORPHANS = 600.0, 100


class _ChangedError(Exception):
    """The bytes of a file changed while they were written."""


class ObjectStorage:
    """Objects below a prefix of one bucket.

    Args:
        terms: bucket and prefix, the file with the key, and the longest time of a read request.

    Attributes:
        secret, chunk_bytes, are_objects: see `Storage`.

    Raises ConfigError if the key cannot be used, the bucket is missing, or access is denied. A
    server that does not answer is no error: it may answer later.
    """

    chunk_bytes, are_objects = _NUM_REQUESTS * _REQUEST_BYTES, True

    def __init__(self, terms: StorageTerms) -> None:
        self.secret = read_secret_file(terms.secret_file, FileSystem())
        self.location = terms.location
        bucket, _, prefix = terms.location.removeprefix("s3://").partition("/")
        self._reads = _connect(bucket, prefix, terms.timeout_s)
        self._writes = _connect(bucket, prefix, _WRITE_TIMEOUT_S)
        self._requests = ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="kv-objects")
        self._noted_at: dict[str, float] = {}  # when this node last wrote an object or its marker
        self._uses: deque[str] = deque(maxlen=_MOST_USES)  # objects whose markers are to be written
        self._listing: _Listing | None = None
        self._list_at = 0.0
        self._folders: dict[str, int] = {}  # number of files by folder; the last listed come last
        self._is_cut = False  # whether a warning about too many objects was logged
        self._check_access()

    def _check_access(self) -> None:
        """Raise ConfigError if the bucket is missing or access is denied."""
        try:
            self._list_one()
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(f"kv_files: {self.location}: {error.strerror}") from error
        except OSError as error:
            logger.warning("%s: %s; the node tries again", self.location, error.strerror)

    def _list_one(self) -> None:
        """Request a list of one object; raise OSError if the server does not answer it."""
        with self.short_errors("list"):
            next(iter(obstore.list(self._reads, chunk_size=1)), None)

    @contextlib.contextmanager
    def read_errors(self) -> Iterator[None]:
        """Replace errors of a read; raise UnreachableError if the server does not list either."""
        try:
            with self.short_errors("read"):
                yield
        except (FileNotFoundError, UnreachableError):
            raise
        except OSError as error:
            with raise_if_unreachable(error):
                self._list_one()
            raise

    @contextlib.contextmanager
    def short_errors(self, action: str) -> Iterator[None]:
        """Replace the library's errors, which quote the server's answers, by short errors."""
        try:
            yield
        except (FileNotFoundError, BaseError) as error:
            raise _plain_error(error, action, self.location) from None

    def open(self, path: str) -> ObjectFile:
        return ObjectFile(self, path)

    def get(
        self, path: str, begin: int, end: int, e_tag: str | None
    ) -> tuple[Any, list[memoryview]]:
        """Request a range of an object; return the object's metadata, and the bytes in pieces.

        Args:
            e_tag: the version to read; None: the present version.

        Raises OSError if the server sends more bytes than the range has.
        """
        options: Any = {"range": (begin, end)}
        if e_tag:
            options["if_match"] = e_tag
        found = obstore.get(self._reads, path, options=options)
        pieces, room = [], end - begin
        for piece in found.stream(min_chunk_size=min(_PIECE_BYTES, room)):
            pieces.append(memoryview(piece))
            room -= len(piece)
            if room < 0:
                raise _wrong_length(self.location)
        return found.meta, pieces

    def size_of(self, path: str) -> int:
        """Request the number of bytes of an object."""
        return int(obstore.head(self._reads, path)["size"])

    def get_parts(self, path: str, begin: int, end: int, e_tag: str | None) -> Iterator[memoryview]:
        """Yield the bytes of a range, read by several requests at a time.

        Raises OSError if the server sends another number of bytes than the range has.
        """

        def fetch(first: int) -> list[memoryview]:
            last = min(first + _REQUEST_BYTES, end)
            _, pieces = self.get(path, first, last, e_tag)
            if sum(map(len, pieces)) != last - first:
                raise _wrong_length(self.location)
            return pieces

        for pieces in self._requests.map(fetch, range(begin, end, _REQUEST_BYTES)):
            yield from pieces

    def note_use(self, path: str) -> None:
        """Queue an object's marker for the next call of `list_changes`.

        The marker is not written now, because a prompt waits for the read. Does nothing if this
        node has written the object, or has queued its marker, within the last `NOTE_USE_S`.
        """
        now = time.time()
        if now - self._noted_at.get(path, 0.0) >= NOTE_USE_S:
            self._noted_at[path] = now
            self._uses.append(path)

    def _write_markers(self, most: int) -> None:
        """Write queued markers; a marker's time of change is its object's last use."""
        for _ in range(min(most, len(self._uses))):
            path = self._uses.popleft()
            if path in self._noted_at:  # this node has not removed the object since
                with contextlib.suppress(OSError), self.short_errors("write"):
                    obstore.put(self._reads, path + USED, b"", use_multipart=False)

    def _forget_notes(self) -> None:
        least = time.time() - NOTE_USE_S
        # Copy in one call, because the thread that reads may add an entry meanwhile.
        noted = list(self._noted_at.items())
        self._noted_at = {path: at for path, at in noted if at > least}

    def write(
        self, path: str, parts: Sequence[bytes | memoryview], is_valid: Callable[[], bool]
    ) -> bool:
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        with self.short_errors("write"):
            if num_bytes <= _PART_BYTES:
                content = b"".join(parts)
                if not is_valid():
                    return False
                obstore.put(self._writes, path, content, use_multipart=False)
            else:
                try:
                    stream = _stream(parts, is_valid)
                    obstore.put(
                        self._writes,
                        path,
                        stream,
                        chunk_size=_PART_BYTES,
                        max_concurrency=_NUM_REQUESTS,
                    )
                except _ChangedError:
                    return False
        self._noted_at[path] = time.time()
        return True

    def remove(self, path: str, unless_used_after: float | None = None) -> float | None:
        with contextlib.suppress(FileNotFoundError), self.short_errors("remove"):
            obstore.delete(self._writes, [path, path + USED])
        self._noted_at.pop(path, None)
        return None

    def close(self) -> None:
        self._write_markers(_USES_PER_CALL)
        self._listing = None

    # ------------------------------------------------------------------ listing

    def list_changes(self) -> Iterator[Listing]:
        self._write_markers(_USES_PER_CALL)
        if self._listing is None:
            if time.monotonic() < self._list_at:
                return
            self._list_at = time.monotonic() + LIST_EVERY_S  # also after an error
            self._forget_notes()
            with self.short_errors("list"):
                self._listing = _Listing(obstore.list(self._writes, chunk_size=_PAGE))
        listing, orphans = self._listing, list[str]()
        try:
            for _ in range(_PAGES_PER_CALL):
                with self.short_errors("list"):
                    page = next(listing.pages, None)
                for folder in listing.add(page):
                    yield self._list_folder(folder, listing, orphans)
                if page is None or listing.num_objects > MOST_OBJECTS:
                    yield from self._end_listing(listing, is_whole=page is None)
                    break
        except OSError:
            self._listing = None
            raise
        if orphans:
            with contextlib.suppress(OSError), self.short_errors("remove"):
                obstore.delete(self._writes, orphans[:_MOST_ORPHANS])

    def _list_folder(self, folder: _Folder, listing: _Listing, orphans: list[str]) -> Listing:
        """Return a folder's files with their last uses; add markers without a file to `orphans`."""
        orphans += [
            f"{folder.path}/{name}{USED}"
            for name, used_at in folder.markers.items()
            if name not in folder.files and listing.began_at - used_at > _ORPHAN_S
        ]
        files = [
            FoundFile(name, size, max(at, folder.markers.get(name, 0.0)))
            for name, (size, at) in folder.files.items()
        ]
        self._folders.pop(folder.path, None)
        self._folders[folder.path] = len(files)
        return Listing(folder.path, files, listing.began_at)

    def _end_listing(self, listing: _Listing, *, is_whole: bool) -> Iterator[Listing]:
        """End a listing and plan the next one; yield the folders that are gone.

        After an incomplete listing, folders that were not seen may exist. The node forgets them
        only while it knows too many objects, so that changing names cannot fill its memory.
        """
        self._listing, self._list_at = None, time.monotonic() + LIST_EVERY_S
        num_known = sum(self._folders.values())
        for folder in [one for one in self._folders if one not in listing.seen]:
            if is_whole or num_known > MOST_OBJECTS:
                num_known -= self._folders.pop(folder)
                yield Listing(folder, (), listing.began_at)
        if not is_whole and not self._is_cut:
            self._is_cut = True
            logger.warning(
                "%s has more than %d objects; the node uses the first ones",
                self.location,
                MOST_OBJECTS,
            )


class _Folder:
    """The objects of one folder: sizes and times of change of runs, and times of markers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.files: dict[str, tuple[int, float]] = {}
        self.markers: dict[str, float] = {}


class _Listing:
    """A listing in progress. Servers list objects by name, so a folder's objects come together.

    Attributes:
        pages: the next pages of objects.
        seen: the folders that were found.
    """

    def __init__(self, pages: Any) -> None:
        self.pages: Iterator[Any] = iter(pages)
        self.began_at = time.time()
        self.num_objects = 0
        self.seen: set[str] = set()
        self._folder: _Folder | None = None

    def add(self, page: Any) -> Iterator[_Folder]:
        """Add a page, and yield the folders that are now complete; None: the listing is over."""
        for found in page or ():
            self.num_objects += 1
            folder, _, name = found["path"].rpartition("/")
            if folder.count("/") != 1:
                continue
            if self._folder is None or self._folder.path != folder:
                yield from self._complete()
                self._folder = _Folder(folder)
                self.seen.add(folder)
            at = found["last_modified"].timestamp()
            if name.endswith(USED):
                self._folder.markers[name.removesuffix(USED)] = at
            else:
                self._folder.files[name] = (found["size"], at)
        if page is None:
            yield from self._complete()

    def _complete(self) -> Iterator[_Folder]:
        if self._folder is not None:
            yield self._folder
            self._folder = None


class ObjectFile:
    """An object that is open for reading; a `StoredFile`. All reads see the same version."""

    def __init__(self, storage: ObjectStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._e_tag: str | None = None
        self._num_bytes = 0
        with storage.read_errors():
            self._head = self._read_head()

    def _read_head(self) -> memoryview:
        try:
            meta, pieces = self._storage.get(self._path, 0, _HEAD_BYTES, None)
        except BaseError:
            # Servers refuse a range of an empty object.
            if self._storage.size_of(self._path):
                raise
            return memoryview(b"")
        self._e_tag, self._num_bytes = meta["e_tag"], meta["size"]
        return memoryview(b"".join(pieces))

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> int:
        end = min(offset + sum(part.nbytes for part in parts), self._num_bytes)
        if end <= offset:
            return 0
        if end <= len(self._head):
            return _copy([self._head[offset:end]], parts)
        with self._storage.read_errors():
            return _copy(self._storage.get_parts(self._path, offset, end, self._e_tag), parts)

    def read_soon(self, offset: int, num_bytes: int) -> None:
        pass  # one read already sends several requests at the same time

    def note_use(self) -> None:
        self._storage.note_use(self._path)

    def close(self) -> None:
        self._head = memoryview(b"")


def _copy(pieces: Iterator[memoryview] | Sequence[memoryview], parts: Sequence[memoryview]) -> int:
    """Copy pieces of bytes, one after another, into parts of memory; return how many bytes."""
    left, num_bytes = [part for part in parts if part.nbytes], 0
    for piece in pieces:
        num_bytes += piece.nbytes
        while piece.nbytes:
            size = min(piece.nbytes, left[0].nbytes)
            left[0][:size] = piece[:size]
            piece, left[0] = piece[size:], left[0][size:]
            if not left[0].nbytes:
                left.pop(0)
    return num_bytes


def _stream(
    parts: Sequence[bytes | memoryview], is_valid: Callable[[], bool]
) -> Iterator[bytes | memoryview]:
    """Yield a file's bytes; then raise _ChangedError, which drops the file, unless it is valid."""
    waiting, num_bytes = list[bytes | memoryview](), 0
    for part in parts:  # small parts are joined
        waiting.append(part)
        num_bytes += len(part)
        if num_bytes >= _PART_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    yield b"".join(waiting)
    if not is_valid():
        raise _ChangedError


def _connect(bucket: str, prefix: str, timeout_s: float) -> S3Store:
    """Return a client; endpoint, region and credentials come from the variables ``AWS_*``."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(timeout_s, 5.0)),
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)},
        )
    except BaseError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(f"kv_files: s3://{bucket}: {problem}") from None


def _wrong_length(location: str) -> OSError:
    return OSError(errno.EIO, "read: another number of bytes than asked for", location)


def _plain_error(error: Exception, action: str, location: str) -> OSError:
    """Return an error without the server's answer, which may quote signed requests."""
    first = str(error).partition("\n")[0]
    found = re.search(r"status code: (\d{3})", first)
    status = found.group(1) if found else ""
    if isinstance(error, FileNotFoundError) or status in ("404", "412"):
        return FileNotFoundError(errno.ENOENT, "no such bucket or object", location)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in ("401", "403"):
        return PermissionError(errno.EACCES, f"access denied ({action})", location)
    if "invalid path" in first:  # the library then lists nothing
        problem = "the name of an object has an empty part, as in a//b, or . or .. as a part"
    elif not status:
        problem = "no answer in time, or no connection"
        return UnreachableError(errno.EIO, f"{action}: {problem}", location)
    else:
        problem = f"status {status}"
    return OSError(errno.EIO, f"{action}: {problem}", location)
