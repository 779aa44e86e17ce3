"""RunStore: reads and writes runs of KV blocks in the files of one storage, and bounds their bytes.

Several nodes may use the storage. Refuses to know: folders, servers, requests, when a read is late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress

from baton.api.errors import ConfigError
from baton.kv.block_hash import BlockHash
from engine.core.metrics import KVFileCounts
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
from engine.kv_files.storage.storage import (
    Listing,
    Storage,
    StoredFile,
    UnreachableError,
    UnreadableFileError,
)

logger = logging.getLogger(__name__)

# Two times of use that differ by fewer seconds count as equal.
_SETTLED_S = 1.0
# Bytes that a disk reads while earlier bytes are copied and their digests are checked.
_AHEAD_BYTES = 2**24
# Maximum number of headers that one look-up reads: thousands of conversations may have the same
# first blocks.
_MOST_HEADERS = 32
# Maximum number of bytes of a run's blocks, because a run of a GPU's blocks is copied to the host
# before it is written.
_MAX_RUN_BYTES = 2**30
# Maximum number of bytes that a listed file counts as. A faulty server may report any size, and the
# sum of all sizes must fit the 64 bits that a beat has for it.
_MAX_LISTED_BYTES = 2**40
# When the limit is reached, files are removed until this share of the limit is free.
_FREE_SHARE = 0.05
# A file is forgotten after this many errors in a row, because each error turns reading off for all
# prompts, although a bad sector, for example, breaks only one file.
_MOST_ERRORS = 2
# Minimum tokens of a run: computing fewer tokens costs less than a file.
MIN_TOKENS = 64


class RunStore:
    """The files of one storage.

    Args:
        storage: keeps the files.
        limit_bytes: maximum bytes of all files.
        memory: bytes of the KV cache's blocks.
        block_size: tokens per block.

    Attributes:
        index: the files that are known.
        memory: bytes of the KV cache's blocks.
        counts: counts since the start.

    Raises ConfigError if the limit is too small for this model.
    """

    def __init__(
        self, storage: Storage, limit_bytes: int, memory: BlockMemory, block_size: int
    ) -> None:
        self._storage, self._limit_bytes = storage, limit_bytes
        self.memory, self._block_size = memory, block_size
        self.index = RunIndex()
        self.counts = KVFileCounts(are_objects=storage.are_objects)
        self._has_warned = False  # whether a warning about an unreadable file was logged
        least = 2 * -(-MIN_TOKENS // block_size) * memory.block_bytes
        if limit_bytes < least:
            raise ConfigError(
                f"kv_files_size: must be at least {least} for this model, got {limit_bytes}"
            )

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
        """End the storage's work for `scan`; call on the thread that calls `scan`."""
        self._storage.close()

    # ------------------------------------------------------------------ listing

    def scan(self) -> None:
        """Note which files other nodes have written or removed. Raises OSError."""
        try:
            for listing in self._storage.list_changes():
                self._note_folder(listing)
        finally:
            self._note_stored()

    def _note_folder(self, listing: Listing) -> None:
        """Update the index with the files that a folder has now."""
        known_runs = self.index.in_folder(listing.folder)
        gone = {run.path for run in known_runs if run.used_at < listing.began_at}
        uses = [
            (max(run.used_at, known.used_at) if known is not None else run.used_at, run, known)
            for run in _listed_runs(listing)
            for known in (self.index.get(run.path),)
        ]
        # The index keeps the order in which files are added or used, so the file that was used last
        # must come last. The files after the first one that is added or moved must follow it.
        is_moved = False
        for used_at, run, known in sorted(uses, key=lambda one: one[0]):
            gone.discard(run.path)
            if known is None:
                self.index.add(run)
            elif is_moved or used_at > known.used_at:
                self.index.note_use(known, max(used_at, known.used_at))
            else:
                continue
            is_moved = True
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
        """Return those runs whose number of common blocks with the chain is known.

        Reads the headers of up to `_MOST_HEADERS` other runs, the most recently used first.
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
            file = self._storage.open(run.path)
            try:
                checked = self._read_header(file, run, job.identity)
                run.hashes = checked.header.hashes
                if piece is not None:
                    self._read_blocks(job, piece, file, checked)
                    self._note_use(run, file, job.first + job.num_done - piece.begin)
            finally:
                file.close()
        except FileNotFoundError:
            job.causes += ("gone",)
            self.index.remove(run.path)
            return False
        except UnusableError as error:
            job.causes += (error.cause,)
            self._drop(run)
            return False
        except UnreadableFileError as error:
            job.causes += ("error",)
            self._forget_unreadable(run, error)
            return False
        except UnreachableError:
            raise
        except OSError:
            run.num_errors += 1
            if run.num_errors >= _MOST_ERRORS:
                self.index.remove(run.path)
            raise
        run.num_errors = 0
        return True

    def _forget_unreadable(self, run: Run, error: OSError) -> None:
        """Remove a file from the index only; log the first such file."""
        self.index.remove(run.path)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kv_files: %s cannot be read: %s; further files like this are only counted",
                run.path,
                error.strerror,
            )

    def _note_use(self, run: Run, file: StoredFile, num_blocks: int) -> None:
        """Note that blocks of a run were read now, also for other nodes and after a restart."""
        now = time.time()
        self.counts.ages.note_many(max(now - run.used_at, 0.0), num_blocks)
        self.index.note_use(run, now)
        with suppress(OSError):  # such as a full disk; the blocks are read already
            file.note_use()

    def _read_header(self, file: StoredFile, run: Run, identity: str) -> CheckedHeader:
        if run.name.num_blocks > max(_MAX_RUN_BYTES // self.memory.block_bytes, 1):
            raise UnusableError("foreign", "no node writes so many blocks into one file")
        prefix = _read_bytes(file, PREFIX_BYTES)
        whole = _read_bytes(file, header_bytes(prefix, run.name.num_blocks))
        secret = self._storage.secret
        return check_header(secret, identity, self.memory.block_bytes, run.name, whole)

    def _read_piece(self, job: ReadJob, piece: Piece) -> bool:
        """Fill the blocks of one file; return whether to go on with the next file."""
        return self._open_run(job, piece.run, piece) and job.first + job.num_done == piece.end

    def _read_blocks(
        self, job: ReadJob, piece: Piece, file: StoredFile, checked: CheckedHeader
    ) -> None:
        """Fill the blocks of a piece, a few at a time, and check each block's digest."""
        size, hashes = self.memory.block_bytes, checked.header.hashes
        per_chunk = max(self._storage.chunk_bytes // size, 1)
        announced = piece.begin  # blocks before this place were announced to the storage
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
            if soon > announced:
                first_byte = checked.data_start + (announced - piece.at) * size
                file.read_soon(first_byte, (soon - announced) * size)
                announced = soon
            if file.read_into(offset, room) < size * len(block_ids):
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
        """Write one run of at most ``most`` blocks, which contains the chain's block ``first``.

        The new run replaces shorter runs directly before it. Returns how many written blocks were
        in no file before; 0: nothing was written, because blocks were evicted meanwhile.
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
        """Return the run that ends directly before ``first``, if a new run should replace it.

        The new run should replace a run that is not longer. A conversation of many turns then has
        few files, because each file has more blocks than all later files together.
        """
        for at, run in self.index.runs_of(job.identity, chain[:first]):
            size = run.name.num_blocks
            ends_here = at + size == first and run.num_equal(chain, at) == size
            if ends_here and at >= job.first and size <= len(chain) - first:
                return run
        return None

    def _write_run(self, job: WriteJob, first: int, hashes: Sequence[BlockHash]) -> bool:
        """Write a new file; return False if its blocks or the secret changed meanwhile."""
        place = first - job.first
        block_ids = job.block_ids[place : place + len(hashes)]
        if not job.are_same(place):
            return False
        blocks = self.memory.contents(block_ids)
        secret = self._storage.secret
        header = encode_header(secret, job.identity, first, hashes, blocks)
        num_bytes = len(header) + sum(block.nbytes for block in blocks)
        self._make_room(num_bytes)
        name = RunName.of(hashes, first, self._block_size, whole=job.has_window)
        run = Run(job.identity, name, num_bytes, time.time(), tuple(hashes))

        def is_valid() -> bool:
            # Making room, or another thread, may have found a new secret meanwhile.
            return job.are_same(place) and self._storage.secret == secret

        if not self._storage.write(run.path, [header, *blocks], is_valid):
            return False
        self.index.add(run)
        self.counts.bytes_written += num_bytes
        self._note_stored()
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Remove files until ``num_bytes`` more bytes fit the limit."""
        if self.index.num_bytes + num_bytes <= self._limit_bytes:
            return
        wanted = max(self._limit_bytes - num_bytes - int(self._limit_bytes * _FREE_SHARE), 0)
        for is_last in (False, True):
            for run in self.index.oldest_first(time.time()):
                if self.index.num_bytes <= wanted:
                    break
                # The first round keeps files that other nodes used meanwhile, and notes that use.
                used_at = self._storage.remove(
                    run.path, None if is_last else run.used_at + _SETTLED_S
                )
                if used_at is not None:
                    self.index.note_use(run, used_at)
                    continue
                self.index.remove(run.path)
                self.counts.files_evicted += 1
        self._note_stored()

    def _drop(self, run: Run) -> None:
        """Remove a file from the index and from the storage."""
        self.index.remove(run.path)
        self._storage.remove(run.path)


def _listed_runs(listing: Listing) -> Iterator[Run]:
    """Yield the runs among the files of a folder."""
    identity = listing.folder.partition("/")[0]
    for file in listing.files:
        name = RunName.parse(file.name) if file.name.endswith(ENDING) else None
        if name is None:
            continue
        run = Run(identity, name, min(file.num_bytes, _MAX_LISTED_BYTES), file.used_at)
        # Leave out a run of another folder: no listing of that folder would show that it is gone.
        if run.path == f"{listing.folder}/{file.name}":
            yield run


def _read_bytes(file: StoredFile, num_bytes: int) -> bytes:
    found = bytearray(num_bytes)
    num_read = file.read_into(0, [memoryview(found)])
    return bytes(found[:num_read])
