"""KVFileTier: reads a prompt's KV from files while the prompt waits; writes KV of ended requests.

    add_request -> files have more than the prefix cache? -> WAITING_FOR_PREFIX, blocks allocated
        a thread reads -> digests right -> blocks enter the prefix cache -> the request is resumed
        files late, damaged or gone    -> the request is resumed, and computes the rest

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from baton.kv.block_hash import BlockHash, BlockHasher
from baton.telemetry.ledger import BlockHolding, BlockOwner
from baton.version import __version__
from engine.core.kv_cache_coordinator import group_suffix
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.metrics import KVFileCounts
from engine.core.request import Request
from engine.core.side_blocks import SideBlocks
from engine.kv_files.file_thread import FileThread
from engine.kv_files.groups import FileGroups, Found, Lack
from engine.kv_files.jobs import ReadJob, WriteJob
from engine.kv_files.rank_stores import RankStores
from engine.kv_files.run_index import plan_pieces
from engine.kv_files.run_store import MIN_TOKENS, RunStore
from engine.kv_files.switch import Switch

# Maximum share of the free blocks that one read may take while no other transfer has blocks.
FREE_SHARE = 0.75
MAX_WAITING_WRITES = 64
# A prompt always waits for its read during this share of the time that computing the tokens would
# take. Afterwards, it waits only if the read is faster than computing.
PATIENCE = 0.05
# While the time to compute a token is unknown, a prompt waits this long for its read, in seconds.
# Afterwards it waits only for a read that will end before the deadline at its speed so far.
_BLIND_WAIT_S = 2.0
# A read of fewer seconds does not show how fast the disk is.
_LONG_READ_S = 0.5
# Minimum prompt tokens of a step that is measured, and the weight of a new measurement in the mean
# time per token.
_LONG_STEP_TOKENS, _STEP_WEIGHT = 64, 0.2
# Maximum seconds for which an ending process waits until its last files are written.
_CLOSE_S = 10.0
_FIRST_SCAN_S = 2.0  # maximum seconds for which a start waits for the first listing of all files


@dataclass(slots=True, eq=False)
class _Read:
    """A read and the requests that wait for it.

    Attributes:
        jobs: (group, job) pairs; each job reads the blocks that a group lacks.
        chain: hashes of the prefix's blocks.
        first: number of leading blocks that were cached in all groups when the read began.
        held_ids: blocks of the prefix that were cached when the read began; the read holds them.
        request_id: id of the first request, for the ledger.
        is_ahead: whether no request has waited for this read; reads for requests come first.
        num_cached: for each job, number of leading blocks that are in the cache.
        num_counted: number of the prefix's blocks that were counted as read.
        is_void: whether the cache was emptied, so that the blocks must not be added to it.
    """

    jobs: tuple[tuple[int, ReadJob], ...]
    chain: Sequence[BlockHash]
    first: int
    held_ids: Sequence[int]
    began_at: float
    request_id: str
    is_ahead: bool = False
    waiters: list[Request] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    num_counted: int = 0
    is_void: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has stopped using the blocks of all jobs."""
        return all(job.has_ended for _, job in self.jobs)

    @property
    def block_ids(self) -> list[int]:
        """Return the blocks that the read fills."""
        return [block_id for _, job in self.jobs for block_id in job.block_ids]

    @property
    def share(self) -> float:
        """Return the share of the blocks that this process has read."""
        return sum(job.num_read for _, job in self.jobs) / len(self.block_ids)

    def num_done(self, *, is_plain: bool) -> int:
        """Return how many of the prefix's blocks this read has made usable for requests."""
        if is_plain:
            return self.jobs[0][1].num_done
        is_whole = all(job.num_done == len(job.block_ids) for _, job in self.jobs)
        return len(self.chain) - self.first if is_whole else 0


class KVFileTier:
    """The file tier of one engine's prefix cache.

    Args:
        manager: owner of the blocks and of the prefix cache.
        side_blocks: limits the blocks of all reads and other transfers together.
        store: the files.
        resume: puts a request that waited for files in line again.
        timeout_s: longest time that a request waits for files.
        clock: returns seconds, never going back.
        windows: window of each KV cache group, in tokens; None: full attention.
        facts: values besides `cache_namespace` that the KV depends on, such as the number of ranks.
        max_model_len: maximum number of tokens of one request.

    Attributes:
        on_ready: called, on any thread, when a read has ended.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        side_blocks: SideBlocks,
        store: RunStore | RankStores,
        resume: Callable[[Request], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        windows: Sequence[int | None] = (None,),
        facts: str = "",
        max_model_len: int = 2**40,
    ) -> None:
        self._max_model_len = max_model_len
        self._manager, self._pool, self._store = manager, manager.block_pool, store
        self._groups, self._facts = FileGroups(self._pool, windows, manager.block_size), facts
        self._side_blocks, self._resume = side_blocks, resume
        self._timeout_s, self._clock = timeout_s, clock
        side_blocks.add_holder(self._list_blocks)
        self.on_ready: Callable[[], None] = lambda: None
        self._tracked: set[Request] = set()  # requests whose KV is written when they end
        self._ended: list[Request] = []  # ended requests whose KV `settle` will queue for writing
        self._reads: list[_Read] = []
        self._coming: dict[BlockHash, _Read] = {}  # by block hash: the open read that brings it
        self._hasher: BlockHasher | None = None
        self._identities: tuple[str, ...] = ()
        self._counts = KVFileCounts()  # counted on the engine's thread
        self._token_s = 0.0  # seconds to compute a prompt token; 0: unknown
        self._reading = Switch("reading KV from files", clock)
        self._writing = Switch("writing KV to files", clock)
        self._news = threading.Event()  # set when a read has ended
        self._reader = FileThread("kv-files-read")
        self._is_scanned = threading.Event()
        self._writer = FileThread("kv-files-write", self._scan)
        self._is_scanned.wait(_FIRST_SCAN_S)  # on a slow disk, requests may come before the listing
        atexit.register(self.close)

    # ------------------------------------------------------------------ requests come

    def track(self, request: Request) -> None:
        """Remember to write the KV of a request and its siblings when they end."""
        self._tracked.update((request, *request.siblings))

    def note_end(self, request: Request) -> None:
        """Let `settle` write the KV of an ended request, if it is tracked."""
        if request in self._tracked:
            self._tracked.remove(request)
            self._ended.append(request)

    def begin_read(self, request: Request) -> bool:
        """Let a request without blocks wait for files if these have more of its KV than the cache.

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
        found = self._find_runs(chain)
        read = (
            self._find_open(found[0], chain, first)
            or self._start_awaited(request, found, chain, first)
            or self._joinable(chain, chain[first])
        )
        if read is None:
            return False
        if read.is_ahead:
            read.is_ahead, read.began_at = False, self._clock()
        read.waiters.append(request)
        request.awaits_prefix = True
        return True

    def read_ahead(self, chain: Sequence[BlockHash], most: int) -> int:
        """Start to read a prefix's missing blocks although no request waits for them.

        Args:
            most: maximum number of blocks to take.

        Returns the number of blocks that the read takes. Reads for requests come first.
        """
        size = self._manager.block_size
        first = len(self._manager.coordinator.longest_hit(chain)) // self._manager.num_groups
        is_coming = any(block_hash in self._coming for block_hash in chain[first:])
        if (len(chain) - first) * size < MIN_TOKENS or is_coming or not self._may_read:
            return 0
        end = self._groups.count_reachable(chain, self._find_runs(chain), first)
        if (end - first) * size < MIN_TOKENS:
            return 0
        read = self._start_read("prefetch", chain[:end], first, most)
        if read is None:
            return 0
        read.is_ahead = True
        return len(read.block_ids)

    def _find_runs(self, chain: Sequence[BlockHash]) -> list[Found]:
        """Return, by group, the runs that begin with a block of a chain."""
        return [self._store.index.runs_of(identity, chain) for identity in self.identities]

    def _find_open(self, found: Found, chain: Sequence[BlockHash], first: int) -> _Read | None:
        """Return the open read that brings most of the chain's missing blocks that are in files.

        Returns None if every open read brings less than half of these blocks; a new read then saves
        more. A file whose header is unread may have few blocks of the chain. So such a file counts
        only if all its blocks come after the blocks that open reads bring.

        Args:
            found: runs of the first group.
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
            read = self._joinable(chain, block_hash)
            if read is not None and read.first <= first:
                return read
        return None

    def _joinable(self, chain: Sequence[BlockHash], block_hash: BlockHash) -> _Read | None:
        """Return the open read that brings a block, if this chain can use the read.

        A read of windows or states serves only chains that contain the read's whole prefix.
        """
        read = self._coming.get(block_hash)
        if read is None or self._groups.is_plain:
            return read
        end = len(read.chain)
        return read if chain[end - 1 : end] == list(read.chain[-1:]) else None

    @property
    def _may_read(self) -> bool:
        is_stuck = any(self._is_late(read) for read in self._reads)
        return not is_stuck and self._reading.is_on

    def _start_awaited(
        self, request: Request, found: Sequence[Found], chain: Sequence[BlockHash], first: int
    ) -> _Read | None:
        """Start to read a prompt's blocks; return None if files have too few or reads are off."""
        misses, size = self._counts.misses, self._manager.block_size
        end = self._groups.count_reachable(chain, found, first)
        if (end - first) * size < MIN_TOKENS:
            misses["absent"] += 1
            return None
        if not self._may_read:
            misses["off"] += 1
            return None
        begun = self._start_read(request.request_id, chain[:end], first)
        for read in self._reads:
            if begun is not None and read.is_ahead:
                self._resume_waiters(read)
        return begun

    def _start_read(
        self, request_id: str, chain: Sequence[BlockHash], first: int, most: int | None = None
    ) -> _Read | None:
        """Start to read the blocks that the groups lack for a prefix, at most ``most`` blocks."""
        lacks = self._groups.list_lacks(chain, len(chain))
        num_blocks = sum(len(chain) - lack.first for lack in lacks)
        held = [block_id for lack in lacks for block_id in lack.held_ids]
        self._pool.touch(held)
        wanted = num_blocks if most is None else min(num_blocks, most)
        block_ids = self._allocate(wanted, ahead=most is not None)
        if len(block_ids) < num_blocks:
            self._counts.misses["no_blocks"] += most is None
            if not (block_ids and self._groups.is_plain):
                self._pool.release((*reversed(held), *block_ids))
                return None
            chain = chain[: lacks[0].first + len(block_ids)]
        jobs = tuple(self._make_jobs(lacks, chain, block_ids))
        read = _Read(jobs, chain, first, held, self._clock(), request_id)
        read.num_cached = [0] * len(jobs)
        self._reads.append(read)
        self._coming.update(dict.fromkeys(chain[first:], read))
        self._reader.submit(functools.partial(self._read, [job for _, job in jobs]))
        return read

    def _make_jobs(
        self, lacks: Sequence[Lack], chain: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> Iterator[tuple[int, ReadJob]]:
        """Yield each group's number and the job that reads the blocks that the group lacks."""
        begin = 0
        for lack in lacks:
            end = begin + len(chain) - lack.first
            if end > begin:
                identity = self.identities[lack.group]
                yield lack.group, ReadJob(identity, chain, lack.first, block_ids[begin:end])
            begin = end

    def _allocate(self, num_blocks: int, *, ahead: bool) -> list[int]:
        """Allocate up to ``num_blocks`` blocks, and leave some for running requests.

        An extent may contain pinned blocks, so reading ahead takes no extents.
        """
        pool = self._pool
        room = min(num_blocks, int(pool.num_free * FREE_SHARE))
        if self._side_blocks.num_held:
            room = min(room, self._side_blocks.num_left)
        return pool.allocate(room, extents=not ahead) or [] if room > 0 else []

    def _list_blocks(self) -> Iterator[int]:
        """Yield the blocks that reads fill, and the cached blocks that reads keep."""
        for read in self._reads:
            yield from read.held_ids
            yield from read.block_ids

    @property
    def identities(self) -> tuple[str, ...]:
        """Return each group's folder name.

        The name is a digest of everything on which the KV depends besides the blocks' hashes.
        """
        hasher = self._manager.hasher
        assert hasher is not None, "files need a prefix cache"
        if hasher is not self._hasher:
            self._hasher = hasher
            facts = f"{__version__} {hasher.algorithm} {hasher.block_size}{self._facts}".encode()
            digest = hashlib.blake2b(hasher.namespace + facts, digest_size=16).hexdigest()
            count = range(len(self._groups))
            self._identities = tuple(self._store.identity(digest, group) for group in count)
        return self._identities

    @property
    def num_expected_blocks(self) -> int:
        """Return how many blocks the longest prefix in files needs, to prepare their memory.

        Nothing has checked the numbers in files' names, so the result is at most the number of
        blocks of this engine's longest request.
        """
        index = self._store.index
        most = -(-self._max_model_len // self._manager.block_size)
        longest = (
            (index.most_blocks if self._groups.has_window(group) else index.longest_chain).get(
                identity, 0
            )
            for group, identity in enumerate(self.identities)
        )
        return sum(min(num_blocks, most) for num_blocks in longest)

    # ------------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Resume requests whose reads have ended or are late; queue writes for ended requests."""
        if self._reads:
            self._settle_reads()
        ended, self._ended = self._ended, []
        for request in ended:
            self._start_write(request.block_hashes)

    def _settle_reads(self) -> None:
        for read in list(self._reads):
            if read.has_ended:
                self._reads.remove(read)
                self._end_read(read)
            elif read.waiters and self._is_late(read):
                self._counts.misses["late"] += 1
                self._judge(read, self._clock() - read.began_at)
                self._cache_done(read)
                self._resume_waiters(read)

    def _is_late(self, read: _Read) -> bool:
        if read.is_ahead:
            return False
        seconds = self._clock() - read.began_at
        return seconds > self._timeout_s or self._is_hopeless(read, seconds)

    def _is_hopeless(self, read: _Read, seconds: float) -> bool:
        """Return whether a read is so slow that computing all its blocks would be faster.

        While the time to compute a token is unknown, a read is too slow if it will not end before
        the deadline.
        """
        num_blocks = len(read.chain) - read.first
        computed_s = num_blocks * self._manager.block_size * self._token_s
        if not computed_s:
            return seconds > _BLIND_WAIT_S and seconds > read.share * self._timeout_s
        if seconds <= max(PATIENCE * computed_s, _LONG_READ_S):
            return False
        return seconds > read.share * computed_s

    def _end_read(self, read: _Read) -> None:
        """Release the blocks of an ended read, and resume its requests."""
        if read.waiters:
            self._judge(read, self._clock() - read.began_at)
        self._cache_done(read)
        # Release the last block first, so that the cache keeps the first blocks of the prefix
        # longest.
        self._pool.release(reversed(read.block_ids))
        self._pool.release(reversed(read.held_ids))
        for _, job in read.jobs:
            for cause in job.causes:
                self._counts.misses[cause] += 1
        self._resume_waiters(read)

    def _judge(self, read: _Read, seconds: float) -> None:
        """Turn reading off for a while if computing the blocks would have been faster."""
        num_blocks = len(read.chain) - read.first
        tokens = read.share * num_blocks * self._manager.block_size
        # A read that has ended without blocks found bad files, and does not show the disk's speed.
        is_stuck = not tokens and not read.has_ended
        is_slow = tokens and self._token_s and seconds > tokens * self._token_s
        if is_stuck or (is_slow and seconds > _LONG_READ_S):
            problem = f"{tokens:.0f} tokens were read in {seconds:.2g} s"
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
        if read.is_void:
            return
        chain = read.chain
        for number, (group, job) in enumerate(read.jobs):
            # Read ``num_done`` only once, because the thread may fill more blocks meanwhile.
            begin, end = read.num_cached[number], job.num_done
            if end <= begin:
                continue
            place, suffix = job.first + begin, group_suffix(group)
            hashes = [block_hash + suffix for block_hash in chain[place : job.first + end]]
            parent = chain[place - 1] if place else None
            self._pool.cache(job.block_ids[begin:end], hashes, parent, silent=group > 0)
            read.num_cached[number] = end
        num_new = read.num_done(is_plain=self._groups.is_plain) - read.num_counted
        if num_new > 0:
            read.num_counted += num_new
            num_tokens = num_new * self._manager.block_size
            self._counts.tokens_read += num_tokens
            self._counts.tokens_unawaited += 0 if read.waiters else num_tokens
            self._counts.hits += len(read.waiters)

    def _resume_waiters(self, read: _Read) -> None:
        """Resume the requests of a read, and stop the read after its present chunk."""
        for _, job in read.jobs:
            job.stop.set()
        for block_hash in read.chain:
            if self._coming.get(block_hash) is read:
                del self._coming[block_hash]
        waiters, read.waiters = read.waiters, []
        for request in waiters:
            request.awaits_prefix = False
            self._resume(request)

    def _start_write(self, chain: list[BlockHash]) -> None:
        """Queue the writing of those cached blocks of a chain that are in no file."""
        size, num_groups = self._manager.block_size, len(self._groups)
        if len(chain) * size < MIN_TOKENS or not self._writing.is_on:
            return
        if self._writer.num_waiting >= MAX_WAITING_WRITES:
            self._counts.runs["skipped"] += 1
            return
        num_stored = self._groups.num_stored(chain, self._find_runs(chain))
        if (len(chain) - num_stored) * size < MIN_TOKENS:
            return
        # A new run may also contain blocks that are in files, so give the thread the whole chain.
        block_ids = self._manager.coordinator.longest_hit(chain)
        chain = chain[: len(block_ids) // num_groups]
        if not chain:
            return
        jobs = [
            self._make_write_job(group, chain, block_ids[group::num_groups])
            for group in range(num_groups)
        ]
        self._writer.submit(functools.partial(self._write, jobs))

    def _make_write_job(
        self, group: int, chain: Sequence[BlockHash], block_ids: Sequence[int]
    ) -> WriteJob:
        """Make the job that writes those blocks of a group that a hit of the whole chain needs."""
        pool, suffix = self._pool, group_suffix(group)
        first = self._groups.num_expired(group, len(chain))
        kept = [(block_ids[i], chain[i] + suffix) for i in range(first, len(chain))]
        since = [pool.cached_at(*one) for one in kept]

        def are_same(place: int) -> bool:
            pairs = zip(kept[place:], since[place:], strict=True)
            return all(pool.cached_at(*one) == at for one, at in pairs)

        identity, has_window = self.identities[group], self._groups.has_window(group)
        return WriteJob(identity, chain, first, block_ids[first:], are_same, has_window)

    def forget_request(self, request_id: str) -> None:
        """Do not write the KV of an ended request, because its results were damaged."""
        self._ended = [one for one in self._ended if one.request_id != request_id]

    def drop_memory(self) -> None:
        """Keep the blocks of open reads out of the cache, because the cache was emptied.

        Requests that wait for a read compute its blocks.
        """
        for read in self._reads:
            read.is_void = True
            self._resume_waiters(read)

    @property
    def memory_in_use(self) -> AbstractContextManager[object]:
        """Return a context in which no thread copies from or to a GPU."""
        return self._store.memory_in_use

    @property
    def is_busy(self) -> bool:
        """Return whether some request waits for files."""
        return any(read.waiters for read in self._reads)

    def wait(self, timeout_s: float) -> None:
        """Wait until some read has ended, but no longer than ``timeout_s``."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """Write the queued blocks, and end the threads; may be called twice."""
        atexit.unregister(self.close)
        self.settle()
        self._writer.submit(self._store.close)
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
            tokens_unawaited=own.tokens_unawaited,
            runs={end: own.runs[end] + store.runs[end] for end in own.runs},
            ages=store.ages.copy(),
        )

    def held(self) -> list[BlockHolding]:
        """Return the blocks of reads, for the ledger."""
        now = self._clock()
        return [
            BlockHolding(
                owner=BlockOwner.CACHE,
                block_ids=(*read.held_ids, *read.block_ids),
                request_id=f"{read.request_id}#files",
                state="READING" if read.waiters else "LATE",
                age_s=now - read.began_at,
            )
            for read in self._reads
        ]

    # ------------------------------------------------------------------ on the tier's threads

    def _read(self, jobs: Sequence[ReadJob]) -> None:
        for job in jobs:
            try:
                self._store.read(job)
            except Exception as error:  # not only OSError: a sleep frees a GPU's memory
                job.causes += ("error",)
                self._reading.fail(repr(error))
        for job in jobs:
            job.has_ended = True
        self._news.set()
        self.on_ready()

    def _write(self, jobs: Sequence[WriteJob]) -> None:
        if not self._writing.is_on:
            return
        try:
            for job in jobs:
                self._store.write(job)
            self._writing.succeed()
        except Exception as error:  # as in `_read`
            self._store.counts.runs["failed"] += 1
            self._writing.fail(repr(error))

    def _scan(self) -> None:
        try:
            self._store.scan()
        except Exception as error:  # not only OSError: a library may raise errors of its own
            self._writing.fail(f"the files cannot be listed: {error}")
        self._is_scanned.set()
