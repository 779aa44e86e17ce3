"""RunStore: reads and writes runs of KV blocks in the files of one folder, and bounds their bytes.

    FOLDER/secret                               key of all digests, made by the first node
    FOLDER/IDENTITY/FIRST TWO DIGITS/NAME.kv    one run of blocks (`run_file.py`)

Several nodes may use the folder. A file gets its name once it is complete, and never changes, so
nodes need no lock. Refuses to know: requests, when a read is late.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from baton.api.errors import ConfigError
from baton.kv.block_hash import BlockHash
from baton.kv.block_key import KEY_BYTES
from engine.core.metrics import KVFileCounts
from engine.kv_files.file_system import FileSystem
from engine.kv_files.folder_watch import FolderWatch
from engine.kv_files.jobs import BlockMemory, ReadJob, WriteJob
from engine.kv_files.run_file import (
    ENDING,
    PREFIX_BYTES,
    CheckedHeader,
    RunName,
    UnusableError,
    check_header,
    encode_header,
    header_bytes,
)
from engine.kv_files.run_index import Piece, Run, RunIndex, plan_pieces

SECRET = "secret"
_UNFINISHED = ".unfinished-"
# Age in seconds after which an unfinished file is taken for one that a killed node has left.
_ABANDONED_S = 600.0
# Clocks of file systems are coarse: a folder that was changed this many seconds before it was read
# is read again.
_SETTLED_S = 1.0
# Seconds between two listings of all folders, because changes by other machines are not reported.
_SCAN_ALL_S = 30.0
_CHUNK_BYTES = 2**21  # bytes that are read between two checks of `ReadJob.stop`
# Bytes that the disk reads while earlier bytes are copied and their digests are checked.
_AHEAD_BYTES = 2**24
# Maximum number of headers that one look-up reads: thousands of conversations may have the same
# first blocks.
_MOST_HEADERS = 32
# Maximum number of bytes of a run's blocks, because a run of a GPU's blocks is copied to the host
# before it is written.
_MAX_RUN_BYTES = 2**30
# When the folder is full, files are removed until this share of the limit is free.
_FREE_SHARE = 0.05
# Minimum tokens of a run: computing fewer tokens costs less than a file.
MIN_TOKENS = 64


class RunStore:
    """The files in one folder.

    Args:
        folder: the tier's folder, which is made if it is missing.
        limit_bytes: maximum bytes of all files in the folder.
        memory: bytes of the KV cache's blocks.
        block_size: tokens per block.
        files: does all operations on files.

    Attributes:
        index: the files that are known.
        memory: bytes of the KV cache's blocks.
        counts: counts since the start.

    Raises ConfigError if the folder cannot be used, or the limit is too small for this model.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        memory: BlockMemory,
        block_size: int,
        files: FileSystem,
    ) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self.memory, self._block_size, self._files = memory, block_size, files
        self.index = RunIndex()
        self.counts = KVFileCounts()
        self._read_at: dict[str, float] = {}  # folders, and the times of change that were seen
        self._watch, self._scan_all_at = FolderWatch(), 0.0
        least = 2 * -(-MIN_TOKENS // block_size) * memory.block_bytes
        if limit_bytes < least:
            raise ConfigError(
                f"kv_files_size: must be at least {least} for this model, got {limit_bytes}"
            )
        try:
            files.make_folder(folder)
            self._secret = self._open_secret()
        except OSError as error:
            raise ConfigError(f"kv_files: {folder}: cannot be used: {error.strerror}") from error

    def _open_secret(self) -> bytes:
        """Return the folder's secret; make it if there is none."""
        path = self._folder / SECRET
        try:
            return self._read_secret(path)  # reading still works if the disk is full
        except FileNotFoundError:
            self._make_secret(path)
        return self._read_secret(path)

    def _make_secret(self, path: Path) -> None:
        new = self._unfinished(self._folder)
        try:
            self._files.write_new(new, [os.urandom(KEY_BYTES)])
            self._files.link(new, path)
        except FileExistsError:
            pass  # another node was faster
        finally:
            self._files.remove(new)

    def _read_secret(self, path: Path) -> bytes:
        descriptor = self._files.open(path)
        try:
            if not self._files.is_private(descriptor):
                raise ConfigError(
                    f"kv_files: {path}: belongs to another user, or is open to all users; whoever "
                    "knows it can change what the model reads"
                )
            found = self._read_bytes(descriptor, KEY_BYTES)
        finally:
            self._files.close(descriptor)
        if len(found) < KEY_BYTES:
            raise ConfigError(f"kv_files: {path}: must have {KEY_BYTES} bytes, got {len(found)}")
        return found

    def _unfinished(self, folder: Path) -> Path:
        """Return a name that no other node uses; nodes in containers have equal process ids."""
        return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"

    @property
    def memory_in_use(self) -> AbstractContextManager[object]:
        """Return a context in which no thread copies from or to a GPU."""
        return self.memory.in_use

    def identity(self, digest: str, group: int) -> str:
        """Return the name of the folder with the files of one KV group.

        Args:
            digest: digest of all that the KV depends on besides the blocks' hashes.
        """
        return f"{digest}.{group}" if group else digest

    def close(self) -> None:
        """Watch the folder no more; call on the thread that calls `scan`."""
        self._watch.close()

    # ------------------------------------------------------------------ listing

    def scan(self) -> None:
        """Read those folders that were changed since the last call. Raises OSError."""
        changed, now = self._watch.take_changed(), time.monotonic()
        are_runs = changed is not None and all(folder.count("/") == 1 for folder in changed)
        if changed is None or not are_runs or now >= self._scan_all_at:
            self._scan_all_at = now + _SCAN_ALL_S
            self._scan_all()
        elif changed:
            for folder in changed:
                self._scan_folder(folder.partition("/")[0], folder)
            self._note_stored()

    def _scan_all(self) -> None:
        """List all folders that were changed, and watch all folders from now on."""
        seen = set()
        self._watch.watch_folder(self._folder, "")
        for identity in self._files.list_folders(self._folder):
            self._watch.watch_folder(self._folder / identity, identity)
            found = self._files.list_folders(self._folder / identity)
            for name, changed_at in found.items():
                folder = f"{identity}/{name}"
                seen.add(folder)
                if self._read_at.get(folder) != changed_at:
                    self._watch.watch_folder(self._folder / folder, folder)
                    is_settled = time.time() - changed_at > _SETTLED_S
                    self._scan_folder(identity, folder)
                    self._read_at[folder] = changed_at if is_settled else -1.0
        for folder in self._read_at.keys() - seen:
            del self._read_at[folder]
            for run in self.index.in_folder(folder):
                self.index.remove(run.path)
        self._note_stored()

    def _scan_folder(self, identity: str, folder: str) -> None:
        gone = {run.path for run in self.index.in_folder(folder)}
        for file in self._files.list_files(self._folder / folder):
            if file.name.startswith(_UNFINISHED):
                if time.time() - file.used_at > _ABANDONED_S:
                    self._files.remove(self._folder / folder / file.name)
                continue
            name = RunName.parse(file.name) if file.name.endswith(ENDING) else None
            if name is None:
                continue
            run = Run(identity, name, file.num_bytes, file.used_at)
            known = self.index.get(run.path)
            gone.discard(run.path)
            if known is None:
                self.index.add(run)
            else:
                known.used_at = max(known.used_at, file.used_at)
        for path in gone:
            self.index.remove(path)

    def _note_stored(self) -> None:
        self.counts.bytes_stored, self.counts.files_stored = self.index.num_bytes, len(self.index)

    # ------------------------------------------------------------------ reading

    def read(self, job: ReadJob) -> None:
        """Fill as many leading blocks of a job as files have. Raises OSError."""
        end = job.first + len(job.block_ids)
        chain = job.chain[:end]
        found = self._learn(job, self.index.runs_of(job.identity, chain))
        pieces = plan_pieces(found, chain, job.first)
        for piece in pieces:
            if job.is_stopped or not self._read_piece(job, piece):
                return
        if job.first + job.num_done < end and not job.causes:
            job.causes += ("absent",)

    def _learn(self, job: ReadJob, found: Sequence[tuple[int, Run]]) -> list[tuple[int, Run]]:
        """Return the runs whose number of blocks of the chain is known.

        For some of the other runs, reads the headers; the latest used files come first.
        """
        usable: list[tuple[int, Run]] = []
        unknown: list[tuple[int, Run]] = []
        for at, run in found:
            is_known = run.num_equal(job.chain, at) is not None
            (usable if is_known else unknown).append((at, run))
        unknown.sort(key=lambda one: -one[1].used_at)
        for at, run in unknown[:_MOST_HEADERS]:
            if not job.is_stopped and self._open_run(job, run):
                usable.append((at, run))
        return usable

    def _open_run(self, job: ReadJob, run: Run, piece: Piece | None = None) -> bool:
        """Read a file's header, and the blocks of a piece; return whether all was right."""
        try:
            descriptor = self._files.open(self._folder / run.path)
        except FileNotFoundError:
            job.causes += ("gone",)
            self.index.remove(run.path)
            return False
        try:
            checked = self._read_header(descriptor, run, job.identity)
            run.hashes = checked.header.hashes
            if piece is not None:
                self._read_blocks(job, piece, descriptor, checked)
        except UnusableError as error:
            job.causes += (error.cause,)
            self.index.remove(run.path)
            self._files.remove(self._folder / run.path)
            return False
        finally:
            self._files.close(descriptor)
        return True

    def _read_header(self, descriptor: int, run: Run, identity: str) -> CheckedHeader:
        prefix = self._read_bytes(descriptor, PREFIX_BYTES)
        whole = self._read_bytes(descriptor, header_bytes(prefix))
        return check_header(self._secret, identity, self.memory.block_bytes, run.name, whole)

    def _read_bytes(self, descriptor: int, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        num_read = self._files.read_into(descriptor, 0, [memoryview(found)])
        return bytes(found[:num_read])

    def _read_piece(self, job: ReadJob, piece: Piece) -> bool:
        """Fill the blocks of one file; return whether to go on with the next file."""
        if not self._open_run(job, piece.run, piece):
            return False
        # Other nodes, and this node after a restart, read the time of use from the file.
        piece.run.used_at = time.time()
        self._files.touch(self._folder / piece.run.path)
        return job.first + job.num_done == piece.end

    def _read_blocks(
        self, job: ReadJob, piece: Piece, descriptor: int, checked: CheckedHeader
    ) -> None:
        """Fill the blocks of a piece, a few at a time, and check each block's digest."""
        size, hashes = self.memory.block_bytes, checked.header.hashes
        per_chunk = max(_CHUNK_BYTES // size, 1)
        told = piece.begin  # the system was told that blocks before this one will be read
        for begin in range(piece.begin, piece.end, per_chunk):
            if job.is_stopped:
                return
            end = min(begin + per_chunk, piece.end)
            if tuple(job.chain[begin:end]) != hashes[begin - piece.at : end - piece.at]:
                raise UnusableError("foreign", "the file has other blocks than it had before")
            block_ids = job.block_ids[begin - job.first : end - job.first]
            room = self.memory.room_for(block_ids)
            offset = checked.data_start + (begin - piece.at) * size
            soon = max(end, min(end + _AHEAD_BYTES // size, piece.end))
            if soon > told:
                told_at = checked.data_start + (told - piece.at) * size
                self._files.read_soon(descriptor, told_at, (soon - told) * size)
                told = soon
            if self._files.read_into(descriptor, offset, room) < size * len(block_ids):
                raise UnusableError("short", "the file is cut off")
            for place, block in enumerate(room, begin - piece.at):
                if not checked.is_right(place, block):
                    raise UnusableError("damaged", "a block's digest is wrong")
            self.memory.put(block_ids, room)
            job.num_done += len(block_ids)
            self.counts.bytes_read += size * len(block_ids)

    # ------------------------------------------------------------------ writing

    def first_missing(self, identity: str, chain: Sequence[BlockHash], first: int = 0) -> int:
        """Return the first place, from ``first`` on, whose block no known file has.

        A run whose hashes are unknown counts only if its last block belongs to the chain.
        """
        found = self.index.runs_of(identity, chain)
        known = [(at, run) for at, run in found if run.num_equal(chain, at) is not None]
        pieces = plan_pieces(known, chain, first)
        return pieces[-1].end if pieces else first

    def write(self, job: WriteJob) -> None:
        """Write those blocks of a job that no file has yet. Raises OSError."""
        chain = job.chain[: job.first + len(job.block_ids)]
        first = self.first_missing(job.identity, chain, job.first)
        half = self._limit_bytes // 2
        chain = chain[: first + half // self.memory.block_bytes]
        most = max(min(half, _MAX_RUN_BYTES) // self.memory.block_bytes, 1)
        least = 1 if job.has_window else -(-MIN_TOKENS // self._block_size)
        while len(chain) - first >= least:
            num_written = self._write_from(job, chain, first, most)
            if not num_written:
                self.counts.runs["skipped"] += 1
                return
            self.counts.runs["written"] += 1
            first += num_written

    def _write_from(self, job: WriteJob, chain: Sequence[BlockHash], first: int, most: int) -> int:
        """Write one run, with at most ``most`` blocks, from a place in the chain on.

        Returns how many blocks were written that no file had; 0: blocks were evicted meanwhile.
        """
        num_before, replaced = first, []
        while (before := self._run_before(job, chain, first)) is not None:
            if len(chain) - before.name.start > most:
                break  # the blocks of both runs do not fit into one run
            replaced.append(before)
            first = before.name.start
        hashes = chain[first : first + most]
        if not self._write_run(job, first, hashes):
            return 0
        for run in replaced:
            self._drop(run)
        return first + len(hashes) - num_before

    def _run_before(self, job: WriteJob, chain: Sequence[BlockHash], first: int) -> Run | None:
        """Return the run that ends where a new one begins, if the new run should replace it.

        A conversation of many turns then lies in few files, because each file has more blocks than
        all later files together.
        """
        for at, run in self.index.runs_of(job.identity, chain[:first]):
            size = run.name.num_blocks
            ends_here = at + size == first and run.num_equal(chain, at) == size
            if ends_here and at >= job.first and size <= len(chain) - first:
                return run
        return None

    def _write_run(self, job: WriteJob, first: int, hashes: Sequence[BlockHash]) -> bool:
        """Write a new file; return whether its blocks were unchanged until it was complete."""
        place = first - job.first
        block_ids = job.block_ids[place : place + len(hashes)]
        if not job.are_same(place):
            return False
        blocks = self.memory.contents(block_ids)
        header = encode_header(self._secret, job.identity, first, hashes, blocks)
        num_bytes = len(header) + sum(block.nbytes for block in blocks)
        self._make_room(num_bytes)
        name = RunName.of(hashes, first, self._block_size, whole=job.has_window)
        run = Run(job.identity, name, num_bytes, time.time(), tuple(hashes))
        folder = self._folder / run.folder
        self._files.make_folder(folder)
        new = self._unfinished(folder)
        try:
            self._files.write_new(new, [header, *blocks])
            if not job.are_same(place):
                return False
            self._files.rename(new, self._folder / run.path)
        finally:
            self._files.remove(new)
        self.index.add(run)
        self.counts.bytes_written += num_bytes
        self._note_stored()
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Remove files, until the limit allows so many bytes more."""
        if self.index.num_bytes + num_bytes <= self._limit_bytes:
            return
        wanted = max(self._limit_bytes - num_bytes - int(self._limit_bytes * _FREE_SHARE), 0)
        for is_last in (False, True):
            for run in self.index.oldest_first(time.time()):
                if self.index.num_bytes <= wanted:
                    break
                # In the first round, learn which files other nodes have read.
                if is_last or not self._note_use_elsewhere(run):
                    self._drop(run)
                    self.counts.files_evicted += 1
        self._note_stored()

    def _note_use_elsewhere(self, run: Run) -> bool:
        """Note when any node last read a file; return whether the noted time has changed."""
        used_at = self._files.used_at(self._folder / run.path)
        if used_at is None or used_at <= run.used_at + _SETTLED_S:
            return False
        run.used_at = used_at
        return True

    def _drop(self, run: Run) -> None:
        """Remove a file."""
        self.index.remove(run.path)
        self._files.remove(self._folder / run.path)
