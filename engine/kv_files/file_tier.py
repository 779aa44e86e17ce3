"""KVFileTier: reads a prompt's KV from files while the prompt waits, and writes it after the end.

    add_request -> files have more than the prefix cache? -> WAITING_FOR_PREFIX, blocks allocated
        a thread reads -> digests right -> blocks enter the prefix cache -> the request is resumed
        late, damaged, gone: the request is resumed at its deadline and computes the rest

    request ends -> its cached blocks that no file has -> a thread writes them as one run

A read fills the prefix cache, not a request, so the scheduler treats the request like any other.
The read holds its blocks until the thread no longer uses them, also after the deadline. A write
holds no blocks: if a block is evicted before the file is complete, the file is dropped. Used on the
engine's thread. Refuses to know: files, steps.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash, BlockHasher
from baton.kv.kv_file_counts import KVFileCounts
from baton.telemetry.ledger import BlockHolding, BlockOwner
from baton.version import __version__
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.side_blocks import SideBlocks
from engine.kv_files.file_thread import FileThread
from engine.kv_files.jobs import ReadJob, WriteJob
from engine.kv_files.run_index import Run, plan_pieces
from engine.kv_files.run_store import MIN_TOKENS, RunStore
from engine.kv_files.switch import Switch

# Largest part of the free blocks for one read, while no other transfer has blocks.
FREE_SHARE = 0.75
MAX_WAITING_WRITES = 64
# Reads that took fewer seconds do not tell how fast the disk is.
_LONG_READ_S = 0.5
# Minimum number of prompt tokens of a step whose time is measured, and the weight of this time in
# the mean time per token.
_LONG_STEP_TOKENS, _STEP_WEIGHT = 64, 0.2
# Seconds for which an ending process waits until its last files are written.
_CLOSE_S = 10.0
_FIRST_SCAN_S = 2.0


@dataclass(slots=True, eq=False)
class _Read:
    """A read and the requests that wait for it.

    Attributes:
        held_ids: blocks of the prefix that were cached when the read began; the read holds them.
        request_id: id of the first request, for the ledger.
        num_cached: leading blocks of the read that have entered the cache.
        is_void: whether the blocks must not enter the cache, because the cache was emptied.
    """

    job: ReadJob
    held_ids: Sequence[int]
    began_at: float
    request_id: str
    waiters: list[Request] = field(default_factory=list)
    num_cached: int = 0
    is_void: bool = False


class KVFileTier:
    """The file tier of one engine's prefix cache.

    Args:
        manager: owner of the blocks and of the prefix cache, with one group without a window.
        side_blocks: bounds the blocks of several reads and other transfers.
        store: the files.
        resume: queues a request that waited for a part of its prompt.
        timeout_s: longest time that a request waits for files.
        clock: returns seconds, never going back.

    Attributes:
        on_ready: called, on any thread, when a read has ended.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        side_blocks: SideBlocks,
        store: RunStore,
        resume: Callable[[Request], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._pool, self._store = manager, manager.block_pool, store
        self._side_blocks, self._resume = side_blocks, resume
        self._timeout_s, self._clock = timeout_s, clock
        side_blocks.add_holder(self._num_held)
        self.on_ready: Callable[[], None] = lambda: None
        self._tracked: dict[Request, None] = {}  # requests to write when they end
        self._reads: list[_Read] = []
        self._coming: dict[BlockHash, _Read] = {}  # blocks that open reads bring
        self._hasher: BlockHasher | None = None
        self._identity = ""
        self._counts = KVFileCounts()  # counted on the engine's thread
        self._token_s = 0.0  # seconds to compute a prompt token; 0: unknown
        self._reading = Switch("reading KV from files", clock)
        self._writing = Switch("writing KV to files", clock)
        self._news = threading.Event()
        self._reader = FileThread("kv-files-read")
        self._is_scanned = threading.Event()
        self._writer = FileThread("kv-files-write", self._scan)
        self._is_scanned.wait(_FIRST_SCAN_S)  # requests may come before a slow disk has answered
        atexit.register(self.close)

    # ------------------------------------------------------------------ requests come

    def track(self, request: Request) -> None:
        """Remember to write the KV of a request and its siblings when they end."""
        for one in (request, *request.siblings):
            self._tracked[one] = None

    def begin_read(self, request: Request) -> bool:
        """Let a request without blocks wait for files that have more of its prompt than the cache.

        Returns whether the request must wait; ``resume`` is called when the wait is over.
        """
        size = self._manager.block_size
        most = (request.num_initial_tokens - 1) // size
        if request.needs_all_rows or request.block_ids or most * size < MIN_TOKENS:
            return False
        num_cached, _ = self._manager.find_initial_prefix(request)
        first, chain = num_cached // size, request.block_hashes[:most]
        if (most - first) * size < MIN_TOKENS:
            return False
        found = self._store.index.runs_of(self.identity, chain)
        read = (
            self._find_open(found, chain, first)
            or self._start_read(request, found, chain, first)
            or self._coming.get(chain[first])
        )
        if read is None:
            return False
        read.waiters.append(request)
        request.awaits_prefix = True
        return True

    def _find_open(
        self, found: Sequence[tuple[int, Run]], chain: Sequence[BlockHash], first: int
    ) -> _Read | None:
        """Return the open read that brings most of those missing blocks that files have.

        Returns None if every open read brings less than half of these blocks: a read of the
        prompt's own then saves more. A file whose header is unread counts only if all its blocks
        come after the blocks that open reads bring, because it may have few blocks of the chain.
        """
        coming, places = self._coming, range(first, len(chain))
        place = next((place for place in places if chain[place] not in coming), len(chain))
        if place == first:
            return None
        useful = [
            (at, run) for at, run in found if at >= place or run.num_equal(chain, at) is not None
        ]
        pieces = plan_pieces(useful, chain, place)
        end = pieces[-1].end if pieces else place
        for block_hash in reversed(chain[(first + end - 1) // 2 : end]):
            read = coming.get(block_hash)
            if read is not None and read.job.first <= first:
                return read
        return None

    def _start_read(
        self,
        request: Request,
        found: Sequence[tuple[int, Run]],
        chain: Sequence[BlockHash],
        first: int,
    ) -> _Read | None:
        """Start to read a chain's blocks; return None if files have too few, or are unreadable."""
        misses, size = self._counts.misses, self._manager.block_size
        pieces = plan_pieces(found, chain, first)
        num_blocks = pieces[-1].end - first if pieces else 0
        if num_blocks * size < MIN_TOKENS:
            misses["absent"] += 1
            return None
        is_stuck = any(self._is_late(read) for read in self._reads)
        if is_stuck or not self._reading.is_on:
            misses["off"] += 1
            return None
        held = self._manager.find_cached_blocks(request)[:first]
        self._pool.touch(held)
        block_ids = self._allocate(num_blocks)
        misses["no_blocks"] += len(block_ids) < num_blocks
        if not block_ids:
            self._pool.release(reversed(held))
            return None
        job = ReadJob(self.identity, chain, first, block_ids)
        read = _Read(job, held, self._clock(), request.request_id)
        self._reads.append(read)
        self._coming.update(dict.fromkeys(chain[first : first + len(block_ids)], read))
        self._reader.submit(functools.partial(self._read, job))
        return read

    def _allocate(self, num_blocks: int) -> list[int]:
        """Allocate up to ``num_blocks`` blocks, and leave some for running requests."""
        pool = self._pool
        room = int(pool.num_free * FREE_SHARE)
        if self._side_blocks.num_held:
            room = min(room, self._side_blocks.num_left)
        return pool.allocate(min(num_blocks, room), extents=True) or [] if room > 0 else []

    def _num_held(self) -> int:
        """Return how many blocks reads are filling."""
        return sum(len(read.job.block_ids) for read in self._reads)

    @property
    def identity(self) -> str:
        """Return the digest of everything besides block hashes that this engine's KV depends on."""
        hasher = self._manager.hasher
        assert hasher is not None, "files need a prefix cache"
        if hasher is not self._hasher:
            self._hasher = hasher
            facts = f"{__version__} {hasher.algorithm} {hasher.block_size}".encode()
            digest = hashlib.blake2b(hasher.namespace + facts, digest_size=16)
            self._identity = digest.hexdigest()
        return self._identity

    # ------------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Resume requests whose reads have ended or are late; write what has ended."""
        if self._reads:
            self._settle_reads()
        for request in [one for one in self._tracked if one.status.is_finished]:
            del self._tracked[request]
            self._start_write(request.block_hashes)

    def _settle_reads(self) -> None:
        for read in list(self._reads):
            if read.job.has_ended:
                self._reads.remove(read)
                self._end_read(read)
            elif read.waiters and self._is_late(read):
                self._counts.misses["late"] += 1
                self._judge(read, self._clock() - read.began_at)
                self._cache_done(read)
                self._let_go(read)

    def _is_late(self, read: _Read) -> bool:
        return self._clock() - read.began_at > self._timeout_s

    def _end_read(self, read: _Read) -> None:
        """Release the blocks of an ended read, and let its requests go on."""
        job = read.job
        if read.waiters:
            self._judge(read, self._clock() - read.began_at)
        self._cache_done(read)
        # Release the last blocks first, so that the cache keeps the beginning of the prefix
        # longest.
        self._pool.release(reversed(job.block_ids))
        self._pool.release(reversed(read.held_ids))
        for cause in job.causes:
            self._counts.misses[cause] += 1
        self._let_go(read)

    def _judge(self, read: _Read, seconds: float) -> None:
        """Turn reading off for a while if computing the blocks would have been faster."""
        tokens = read.job.num_done * self._manager.block_size
        # A damaged file brings no blocks either, but its time does not tell how fast the disk is.
        is_stuck = not tokens and not read.job.has_ended
        is_slow = tokens and self._token_s and seconds > tokens * self._token_s
        if is_stuck or (is_slow and seconds > _LONG_READ_S):
            problem = f"{tokens} tokens were read in {seconds:.2g} s"
            self._reading.fail(f"{problem}, and computing takes {self._token_s:.2g} s per token")
        elif tokens:
            self._reading.succeed()

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with prompt tokens how long it takes to compute a token."""
        if num_tokens >= _LONG_STEP_TOKENS:
            found = seconds / num_tokens
            self._token_s += (found - self._token_s) * (_STEP_WEIGHT if self._token_s else 1.0)

    def _cache_done(self, read: _Read) -> None:
        """Cache those blocks of a read that are complete and not cached yet."""
        job, begin = read.job, read.num_cached
        end = 0 if read.is_void else job.num_done  # the thread may fill further blocks meanwhile
        if end <= begin:
            return
        chain, place = job.chain, job.first + begin
        hashes = chain[place : job.first + end]
        self._pool.cache(job.block_ids[begin:end], hashes, chain[place - 1] if place else None)
        read.num_cached = end
        self._counts.tokens_read += (end - begin) * self._manager.block_size
        self._counts.hits += len(read.waiters)

    def _let_go(self, read: _Read) -> None:
        """Resume the requests of a read, and stop the read after its current file."""
        read.job.is_stopped = True
        for block_hash in read.job.chain:
            if self._coming.get(block_hash) is read:
                del self._coming[block_hash]
        waiters, read.waiters = read.waiters, []
        for request in waiters:
            request.awaits_prefix = False
            self._resume(request)

    def _start_write(self, chain: list[BlockHash]) -> None:
        """Queue those cached blocks of a chain that no file has for writing."""
        size, pool = self._manager.block_size, self._pool
        if len(chain) * size < MIN_TOKENS or not self._writing.is_on:
            return
        if self._writer.num_waiting >= MAX_WAITING_WRITES:
            self._counts.runs["skipped"] += 1
            return
        if (len(chain) - self._store.first_missing(self.identity, chain)) * size < MIN_TOKENS:
            return
        # A longer run may write earlier blocks again, although files have these blocks.
        block_ids: list[int] = []
        for block_hash in chain:
            block_id = pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if not block_ids:
            return
        kept = list(zip(block_ids, chain, strict=False))
        since = [pool.cached_at(*one) for one in kept]

        def are_same(place: int) -> bool:
            pairs = zip(kept[place:], since[place:], strict=True)
            return all(pool.cached_at(*one) == at for one, at in pairs)

        job = WriteJob(self.identity, chain[: len(block_ids)], 0, block_ids, are_same)
        self._writer.submit(functools.partial(self._write, job))

    def forget_request(self, request_id: str) -> None:
        """Write nothing of a request whose results were damaged."""
        for request in [one for one in self._tracked if one.request_id == request_id]:
            del self._tracked[request]

    def drop_memory(self) -> None:
        """Let no block of an open read enter the cache, because the cache was emptied.

        Requests that wait for a read compute its blocks.
        """
        for read in self._reads:
            read.is_void = True
            self._let_go(read)

    @property
    def memory_in_use(self) -> threading.Lock:
        """Return the lock that a thread holds while it copies from or to a GPU."""
        return self._store.memory.in_use

    @property
    def is_busy(self) -> bool:
        """Return whether some request waits for files."""
        return any(read.waiters for read in self._reads)

    def wait(self, timeout_s: float) -> None:
        """Wait until some read has ended, but no longer than ``timeout_s``."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """Write what is queued, and end the threads; may be called twice."""
        atexit.unregister(self.close)
        self.settle()
        self._reader.close(0.0)
        self._writer.close(_CLOSE_S)

    # ------------------------------------------------------------------ what operators see

    def counts(self) -> KVFileCounts:
        """Return all counts; safe from any thread."""
        own, store = self._counts, self._store.counts
        return dataclasses.replace(
            store,
            hits=own.hits,
            misses=dict(own.misses),
            tokens_read=own.tokens_read,
            runs={end: own.runs[end] + store.runs[end] for end in own.runs},
        )

    def held(self) -> list[BlockHolding]:
        """Return the blocks of reads, for the ledger."""
        now = self._clock()
        return [
            BlockHolding(
                owner=BlockOwner.CACHE,
                block_ids=(*read.held_ids, *read.job.block_ids),
                request_id=f"{read.request_id}#files",
                state="READING" if read.waiters else "LATE",
                age_s=now - read.began_at,
            )
            for read in self._reads
        ]

    # ------------------------------------------------------------------ on the tier's threads

    def _read(self, job: ReadJob) -> None:
        try:
            self._store.read(job)
        except Exception as error:  # besides OSError: a GPU's memory is gone during a sleep
            job.causes += ("error",)
            self._reading.fail(repr(error))
        job.has_ended = True
        self._news.set()
        self.on_ready()

    def _write(self, job: WriteJob) -> None:
        if not self._writing.is_on:
            return
        try:
            self._store.write(job)
            self._writing.succeed()
        except Exception as error:  # as in `_read`
            self._store.counts.runs["failed"] += 1
            self._writing.fail(repr(error))

    def _scan(self) -> None:
        try:
            self._store.scan()
        except OSError as error:
            self._writing.fail(f"the folder cannot be read: {error}")
        self._is_scanned.set()
