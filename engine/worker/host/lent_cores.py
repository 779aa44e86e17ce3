"""Idle cores of a node, lent to other nodes on the machine.

    0-7.busy    in a shared folder: locked by the cores' owner while it has work. Byte 0 is 1
                while the owner has work, byte 1 while the borrower computes on the cores
    0-7.lent    locked by the node that borrows the cores

The borrower reads byte 0 before each multi-threaded part of a step, and leaves the cores if the
byte is 1. An owner with new work waits some milliseconds until the borrower's part has ended.
Without this wait, where Linux schedules by session, a thread on a lent core may not run for a
second. Locks end with the process that holds them, so a dead node leaves no lock.

Refuses to know: the computation, nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from baton.api.errors import ConfigError
from baton.engine_config import EngineConfig, parse_cpu_list
from baton_kernels.dispatch import native_ops
from baton_kernels.native.ops import NativeOps

logger = logging.getLogger(__name__)

_BUSY, _LENT = ".busy", ".lent"
_IS_BUSY, _IS_USED = 0, 1  # indices of the two bytes in a ``.busy`` file
# Threads of native kernels keep addresses of these bytes, so mappings last as long as the process.
_MAPPED: list[ctypes.Array[ctypes.c_int8]] = []
_MOST_SHARES = 64  # maximum number of nodes to borrow from; MOST_LENDERS in team.c
_LONGEST_WAIT_S = 0.02
_LONGEST_LOCK_S = 0.001
_POLL_S = 0.0002
AfterLayer = Callable[[int], None]


class LentCores:
    """One node's own cores, which it lends, and other nodes' cores, which it borrows.

    Only the computing thread calls the methods, because they set the number of threads that compute
    with it; other threads may call only `keep`. The node's cores are lent until the first `borrow`.

    Args:
        folder: the machine's folder of locks, which must exist.
        own: list of the node's cores, such as ``0-7``; also the name of the lock files.
        ops: native kernels that place threads.

    Raises OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, own: str, ops: NativeOps) -> None:
        self._folder, self._name, self._ops = folder, own, ops
        self._own = parse_cpu_list(own)
        self._num_own_threads = torch.get_num_threads()
        self._busy = _open(folder / f"{own}{_BUSY}")
        self._lent = _open(folder / f"{own}{_LENT}")
        self._bytes = _map_bytes(self._busy)
        self._is_busy = self._computes = False
        self._num_keepers = 0
        self._marking = threading.Lock()
        self._may_borrow = True
        self._has_failed = False
        self._others: dict[str, _Share] = {}
        self._borrowed: list[_Share] = []

    def borrow(self) -> None:
        """Mark this node's cores as busy, and compute on idle nodes' cores as well."""
        if not self._computes:
            with self._marking:
                self._computes = self._mark_busy()
            self._find_others()
        if not self._may_borrow:
            return
        kept = [share for share in self._borrowed if not share.is_busy()]
        new = (share for share in self._others.values() if share not in self._borrowed)
        num_more = _MOST_SHARES - len(kept)
        self._use(kept + list(itertools.islice((one for one in new if one.borrow()), num_more)))

    def rest(self) -> None:
        """Lend this node's cores while there is nothing to compute; return borrowed cores."""
        self._use([])
        with self._marking:
            self._computes = False
            self._lend_if_idle()

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Lend no core inside this context, because another thread of this node needs the cores."""
        with self._marking:
            self._num_keepers += 1
            self._mark_busy()
        try:
            yield
        finally:
            with self._marking:
                self._num_keepers = max(self._num_keepers - 1, 0)  # `close` may have set it to 0
                self._lend_if_idle()

    def are_taken(self) -> bool:
        """Return whether another node computes on this node's cores."""
        if not _lock(self._lent, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._lent, fcntl.LOCK_UN)
        return False

    def between_layers(self, after_layer: AfterLayer | None) -> AfterLayer:
        """Return a function to call after each layer: it calls `borrow`, then ``after_layer``."""

        def borrow_too(layer: int) -> None:
            self.borrow()
            if after_layer is not None:
                after_layer(layer)

        return borrow_too

    def close(self) -> None:
        """Return borrowed cores, and lend this node's cores until the process ends."""
        self.rest()
        with self._marking:
            self._num_keepers = 0
            self._lend_if_idle()
        os.close(self._busy)
        os.close(self._lent)
        for share in self._others.values():
            share.close()
        self._others.clear()

    def _mark_busy(self) -> bool:
        """Mark this node's cores as busy, and wait until a borrower has left them.

        Return whether this node now holds the lock that marks them.
        """
        if not self._is_busy:
            give_up_at = time.monotonic() + _LONGEST_LOCK_S
            while not (is_locked := _lock(self._busy)) and time.monotonic() < give_up_at:
                pass  # another node holds the lock for microseconds, to test it
            self._is_busy = is_locked
            self._bytes[_IS_BUSY] = 1
            self._wait_for_borrower()
        return self._is_busy

    def _lend_if_idle(self) -> None:
        """Mark this node's cores as idle, unless a step or a keeper needs them."""
        if self._is_busy and not self._computes and not self._num_keepers:
            self._bytes[_IS_BUSY] = 0
            fcntl.flock(self._busy, fcntl.LOCK_UN)
            self._is_busy = False

    def _wait_for_borrower(self) -> None:
        """Wait until no other node computes on this node's cores, at most `_LONGEST_WAIT_S`."""
        give_up_at = time.monotonic() + _LONGEST_WAIT_S
        while self._bytes[_IS_USED] and time.monotonic() < give_up_at:
            if not self.are_taken():  # the borrower died while computing
                self._bytes[_IS_USED] = 0
            time.sleep(_POLL_S)

    def _use(self, shares: list[_Share]) -> None:
        """Compute on this node's cores and the borrowed cores from now on."""
        if shares == self._borrowed:
            return
        for share in self._borrowed:
            if share not in shares:
                share.give_back()
        self._borrowed = shares
        # No thread may look for busy lenders until all threads are placed.
        self._ops.watch_lenders(self._num_own_threads, [])
        lent = frozenset[int]().union(*(share.cores for share in shares))
        if lent and not self._ops.place_threads(self._num_own_threads, self._own, len(lent), lent):
            logger.warning("may not run on borrowed cores: computing on its own cores only")
            for share in shares:
                share.give_back()
            self._borrowed, self._may_borrow, lent = [], False, frozenset()
        self._ops.watch_lenders(self._num_own_threads, [share.address for share in self._borrowed])
        torch.set_num_threads(self._num_own_threads + len(lent))

    def _find_others(self) -> None:
        try:
            paths = list(self._folder.glob(f"*{_BUSY}"))
        except OSError as error:  # no file descriptor is left, or the folder is gone
            if not self._has_failed:
                self._has_failed = True
                logger.warning("cannot look for nodes that lend cores (logged once): %s", error)
            return
        for path in paths:
            name = path.stem
            if name == self._name or name in self._others:
                continue
            try:
                share = _Share(self._folder, name)
            except (ConfigError, OSError):  # not a list of cores, or the file is not accessible
                continue
            if share.cores.isdisjoint(self._own):
                self._others[name] = share
            else:
                share.close()


class _Share:
    """Another node's cores, which this node may borrow.

    Attributes:
        address: address of the two bytes of the owner's ``.busy`` file, which is mapped into
            memory.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.cores = parse_cpu_list(name)
        with contextlib.ExitStack() as opened:
            self._busy = _open(folder / f"{name}{_BUSY}")
            opened.callback(os.close, self._busy)
            self._lent = _open(folder / f"{name}{_LENT}")
            opened.callback(os.close, self._lent)
            self._bytes = _map_bytes(self._busy)
            opened.pop_all()
        self.address = ctypes.addressof(self._bytes)

    def is_busy(self) -> bool:
        """Return whether the owner of the cores has work."""
        if not _lock(self._busy, fcntl.LOCK_SH):
            return True
        self._bytes[_IS_BUSY] = 0  # an owner that died may have left a 1
        fcntl.flock(self._busy, fcntl.LOCK_UN)
        return False

    def borrow(self) -> bool:
        """Borrow the cores; return False if they are busy or already borrowed."""
        return not self.is_busy() and _lock(self._lent)

    def give_back(self) -> None:
        fcntl.flock(self._lent, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._busy)
        os.close(self._lent)


def lent_cores(config: EngineConfig) -> LentCores | None:
    """Return the `LentCores` of a node; None if lending is off or impossible.

    Raises ConfigError if the folder of the locks cannot be written to.
    """
    if not config.core_locks:
        return None
    ops = native_ops() if config.native_kernels else None
    if ops is None or config.num_ranks > 1:
        logger.warning("core_locks: needs native kernels and one rank; cores stay as they are")
        return None
    logger.info("cores %s are lent while idle, by locks in %s", config.cpu_list, config.core_locks)
    try:
        return LentCores(Path(config.core_locks), config.cpu_list, ops)
    except OSError as error:
        raise ConfigError(
            f"core_locks: cannot write to {config.core_locks}: {error.strerror}"
        ) from error


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _map_bytes(descriptor: int) -> ctypes.Array[ctypes.c_int8]:
    """Return the two bytes of a file, shared with all processes that map the file."""
    # Write the bytes, because a hole in the file would need a page when it is first written.
    os.posix_fallocate(descriptor, 0, 2)
    mapped = (ctypes.c_int8 * 2).from_buffer(mmap.mmap(descriptor, 2))
    _MAPPED.append(mapped)
    return mapped


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file without waiting; return False if the lock is held, or the kernel fails."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or the kernel lacks memory
        return False
    return True
