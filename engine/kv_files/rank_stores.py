"""RankStores: the files of a node with several ranks; each rank has files of its part of the KV.

    leader   gives a job to its own store, and an order to each other rank; joins the outcomes
    rank     gives an order to its own store; before a file gets its name, asks the leader whether
             the written blocks are unchanged

A read brings only the leading blocks that every rank could read. Refuses to know: requests, steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from typing import Protocol

import msgspec

from baton.api.errors import ConfigError
from baton.kv.block_hash import BlockHash
from baton.processes import rank_links
from engine.core.metrics import KVFileCounts
from engine.kv_files.jobs import BlockMemory, ReadJob, WriteJob
from engine.kv_files.open_store import StoreTerms, open_store
from engine.kv_files.run_index import RunIndex, plan_pieces
from engine.kv_files.run_store import RunStore

logger = logging.getLogger(__name__)

_SCAN_S = 1.0
_STOP_S = 0.05  # seconds between two looks whether the other ranks' reads should stop
_ENTRY = f"{__name__}:serve_rank"


class OpenStore(msgspec.Struct, frozen=True):
    """A message: open your store, and connect to the leader's socket ``address``."""

    terms: StoreTerms
    address: str


class FileOrder(msgspec.Struct, tag=True, frozen=True):
    """A message: read or write blocks; the fields are those of `ReadJob` and `WriteJob`."""

    identity: str
    chain: list[BlockHash]
    first: int
    block_ids: list[int]
    has_window: bool = False


class StopRead(msgspec.Struct, tag=True, frozen=True):
    """A message: end your read after the present chunk."""


class AskUnchanged(msgspec.Struct, tag=True, frozen=True):
    """A rank's question: are the blocks from ``place`` on unchanged? The answer is one byte."""

    place: int


class OrderDone(msgspec.Struct, tag=True, frozen=True):
    """The outcome of an order; ``num_bytes`` were read or written, or ``error`` was raised."""

    num_done: int = 0
    causes: tuple[str, ...] = ()
    num_bytes: int = 0
    error: str = ""


_encode = msgspec.msgpack.encode
_OPEN = msgspec.msgpack.Decoder(OpenStore)
_TO_RANK = msgspec.msgpack.Decoder(FileOrder | StopRead)
_FROM_RANK = msgspec.msgpack.Decoder(AskUnchanged | OrderDone)


class RankStores:
    """The stores of all ranks. The leader uses this object as it would use a `RunStore`.

    Args:
        own: the leader's store.
        rank: number of the leader.
        readers, writers: connections to the other ranks' threads.
    """

    def __init__(
        self,
        own: RunStore,
        rank: int,
        readers: Sequence[Connection],
        writers: Sequence[Connection],
    ) -> None:
        self._own, self._rank = own, rank
        self._readers, self._writers = readers, writers
        # One lock is held while ranks read, one while they write; a sleep waits for both.
        self._reads, self._writes = threading.Lock(), threading.Lock()

    @property
    def index(self) -> RunIndex:
        """The known files of the leader; the tier assumes that the other ranks have the same."""
        return self._own.index

    @property
    def counts(self) -> KVFileCounts:
        """Counts of bytes over all ranks, and of runs on the leader."""
        return self._own.counts

    @property
    def memory_in_use(self) -> AbstractContextManager[object]:
        """Return a context in which no rank copies from or to a GPU."""
        return _hold_both(self._reads, self._writes)

    def identity(self, digest: str, group: int) -> str:
        """Return the name of the folder with the leader's files of one KV group."""
        return f"{self._own.identity(digest, group)}-{self._rank}"

    def scan(self) -> None:
        """Read the changed folders; see `RunStore.scan`."""
        self._own.scan()

    def close(self) -> None:
        """Stop watching the folder; see `RunStore.close`."""
        self._own.close()

    def read(self, job: ReadJob) -> None:
        """Let all ranks read; see `RunStore.read`. ``job.num_done`` is 0 until all have ended."""
        with self._reads:
            order = FileOrder(job.identity, list(job.chain), job.first, list(job.block_ids))
            _send(self._readers, order)
            own = ReadJob(job.identity, job.chain, job.first, job.block_ids, stop=job.stop)
            job.own = own
            try:
                self._own.read(own)
            finally:  # the ranks use the blocks until they have answered
                found = self._outcomes(own)
            self._own.counts.bytes_read += sum(one.num_bytes for one in found)
            job.causes += tuple({*own.causes, *(cause for one in found for cause in one.causes)})
            _raise_first(found)
            job.num_done = min(own.num_done, *(one.num_done for one in found))
            if job.num_done < own.num_done and not job.is_stopped:
                self._forget_part(job)

    def _outcomes(self, own: ReadJob) -> list[OrderDone]:
        """Return the other ranks' outcomes; stop their reads if the leader's fell short."""
        is_over, is_stop_sent, found = own.num_done < len(own.block_ids), False, []
        for link in self._readers:
            while not (is_over or own.is_stopped or link.poll(_STOP_S)):
                pass
            if not is_stop_sent and (is_over or own.is_stopped):
                is_stop_sent = True
                _send(self._readers, StopRead())
            found.append(_receive_done(link))
        return found

    def _forget_part(self, job: ReadJob) -> None:
        """Forget the leader's files with blocks that another rank lacks.

        No further prompt then waits for these files. When the next request with this prefix ends,
        each rank writes the blocks that its files lack.
        """
        end = job.first + job.num_done
        for at, run in self.index.runs_of(job.identity, job.chain):
            if at + (run.num_equal(job.chain, at) or 0) > end:
                self.index.remove(run.path)

    def write(self, job: WriteJob) -> None:
        """Let all ranks write; see `RunStore.write`."""
        with self._writes:
            block_ids = list(job.block_ids)
            order = FileOrder(job.identity, list(job.chain), job.first, block_ids, job.has_window)
            _send(self._writers, order)
            found: list[OrderDone] = []
            others = threading.Thread(target=self._answer_ranks, args=(job, found), daemon=True)
            others.start()
            try:
                self._own.write(job)
            finally:
                others.join()
            self._own.counts.bytes_written += sum(one.num_bytes for one in found)
            _raise_first(found)

    def _answer_ranks(self, job: WriteJob, found: list[OrderDone]) -> None:
        """Answer the ranks' questions until all ranks have sent their outcomes."""
        links = list(self._writers)
        while links:
            for link in wait(links):
                assert isinstance(link, Connection)
                try:
                    message = _FROM_RANK.decode(link.recv_bytes())
                    if isinstance(message, AskUnchanged):
                        link.send_bytes(b"\1" if job.are_same(message.place) else b"\0")
                        continue
                except (EOFError, OSError) as error:
                    message = OrderDone(error=f"a rank is gone: {error}")
                found.append(message)
                links.remove(link)


@contextlib.contextmanager
def _hold_both(first: threading.Lock, second: threading.Lock) -> Iterator[None]:
    with first, second:
        yield


def _send(links: Sequence[Connection], message: FileOrder | StopRead) -> None:
    content = _encode(message)
    for link in links:
        link.send_bytes(content)


def _receive_done(link: Connection) -> OrderDone:
    try:
        message = _FROM_RANK.decode(link.recv_bytes())
    except (EOFError, OSError) as error:
        return OrderDone(error=f"a rank is gone: {error}")
    assert isinstance(message, OrderDone)
    return message


def _raise_first(found: Sequence[OrderDone]) -> None:
    problem = next((one.error for one in found if one.error), "")
    if problem:
        raise OSError(problem)


def open_rank_stores(
    own: RunStore,
    rank: int,
    terms: StoreTerms,
    attach: Callable[[str, bytes], Mapping[int, Connection]],
) -> RankStores:
    """Open the stores of all other ranks.

    Args:
        own: the leader's store.
        rank: number of the leader.
        terms: the options with which the leader's store was opened.
        attach: starts a function on a thread of each other rank's process; see `Executor.attach`.

    Raises ConfigError if a rank does not connect in time.
    """
    links: dict[bytes, list[Connection]] = {b"read": [], b"write": []}
    with rank_links.listen() as listener:
        num_others = len(attach(_ENTRY, _encode(OpenStore(terms, listener.address))))
        for _ in range(2 * num_others):
            try:
                purpose, link = listener.accept()
            except TimeoutError:
                raise ConfigError(
                    "kv_files: a rank's process did not open its files within "
                    f"{rank_links.START_TIMEOUT_S:g} s"
                ) from None
            links[purpose].append(link)
    return RankStores(own, rank, links[b"read"], links[b"write"])


# ---------------------------------------------------------------- in the other ranks' processes


class RankMemory(Protocol):
    """The part of a rank's `KVMemory` that files need."""

    @property
    def rank(self) -> int:
        """Return the rank's number among all ranks."""

    def open_bytes(self) -> BlockMemory:
        """Return the bytes of the rank's blocks."""


class _StopSent(threading.Event):
    """An event that counts as set once the leader has sent `StopRead`."""

    def __init__(self, link: Connection) -> None:
        super().__init__()
        self._link = link

    def is_set(self) -> bool:
        return self._link.poll(0)


class RankScans:
    """Lists a rank's files on the thread that writes, and lets reads wait for files not listed yet.

    Without this wait, an order could name blocks of files that the rank has but has not listed:
    right after the start, or when another node has just written them. The leader would then forget
    its own files with these blocks.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._num_begun = self._num_ended = 0  # written by the thread that writes

    def scan(self) -> None:
        """List the changed folders; see `RunStore.scan`."""
        self._num_begun += 1
        try:
            self._store.scan()
        except Exception as error:  # orders then find only the files listed before
            logger.debug("the files cannot be listed: %r", error)
        self._num_ended = self._num_begun

    def wait_for_files(self, job: ReadJob) -> None:
        """Wait until a job's files are listed, a later scan has ended, or the job is stopped."""
        last = self._num_begun + 1  # the first scan that begins after this call
        while self._num_ended < last and not (job.is_stopped or self._has_listed(job)):
            time.sleep(_STOP_S)

    def _has_listed(self, job: ReadJob) -> bool:
        end = job.first + len(job.block_ids)
        chain = job.chain[:end]
        pieces = plan_pieces(self._store.index.runs_of(job.identity, chain), chain, job.first)
        return bool(pieces) and pieces[-1].end == end


def serve_rank(beside: Connection, memory: RankMemory, argument: bytes) -> None:
    """Carry out the leader's orders to read and write this rank's files, until the leader ends.

    Args:
        beside: the connection from `Executor.attach`; unused, because reads and writes have one
            connection each.
        memory: the rank's KV memory.
        argument: an encoded `OpenStore` message.
    """
    given = _OPEN.decode(argument)
    store = open_store(given.terms, memory.open_bytes())
    reader, writer = (rank_links.connect(given.address, purpose) for purpose in (b"read", b"write"))
    scans = RankScans(store)
    read = functools.partial(_read, scans)
    serve = threading.Thread(
        target=_serve, args=(reader, store, memory.rank, read), name="kv-files-read", daemon=True
    )
    serve.start()
    _serve(writer, store, memory.rank, _write, scans.scan)


def _serve(
    link: Connection,
    store: RunStore,
    rank: int,
    work: Callable[[Connection, RunStore, FileOrder], OrderDone],
    scan: Callable[[], None] = lambda: None,
) -> None:
    with contextlib.suppress(EOFError, ConnectionError):  # the leader has ended
        while True:
            scan()
            if not link.poll(_SCAN_S):
                continue
            message = _TO_RANK.decode(link.recv_bytes())
            if isinstance(message, StopRead):
                continue  # the read had already ended
            base, _, _ = message.identity.rpartition("-")
            order = msgspec.structs.replace(message, identity=f"{base}-{rank}")
            try:
                done = work(link, store, order)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:  # a full disk, or GPU memory that a sleep has released
                done = OrderDone(error=repr(error))
            link.send_bytes(_encode(done))


def _read(scans: RankScans, link: Connection, store: RunStore, order: FileOrder) -> OrderDone:
    before = store.counts.bytes_read
    job = ReadJob(order.identity, order.chain, order.first, order.block_ids, stop=_StopSent(link))
    scans.wait_for_files(job)
    store.read(job)
    return OrderDone(job.num_done, job.causes, store.counts.bytes_read - before)


def _write(link: Connection, store: RunStore, order: FileOrder) -> OrderDone:
    def are_same(place: int) -> bool:
        link.send_bytes(_encode(AskUnchanged(place)))
        return link.recv_bytes() == b"\1"

    before = store.counts.bytes_written
    store.write(
        WriteJob(
            order.identity, order.chain, order.first, order.block_ids, are_same, order.has_window
        )
    )
    return OrderDone(num_bytes=store.counts.bytes_written - before)
