"""ConnectionFences: tells when no byte of a silent peer on another machine can arrive any more.

    silent for SILENT_S -> its connections are listed -> all are closed -> 10 reads, 0.5 s -> end
                              `-> still open after CLOSE_AFTER_S: this node shuts them down

A node cannot see whether a process on another machine lives. But a sender posts a write only while
its lease is valid, and only over a connection over which a self-test has passed. The lease has
ended when the sender has been silent for longer than a lease. From then on, its bytes can arrive
only over connections that exist already. Once these connections are closed, nothing more can
arrive, even if the sender lives and is only cut off.

UCX does not tell which connection belongs to which peer. A connection counts as the peer's unless
its remote address is another known peer's, or both its ends are this worker's, because UCX connects
each worker with itself. So if one of several peers on a host is silent, the connections of all of
them are shut down.

Refuses to know: transfers, the meaning of messages.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from kvconnector.transports.base import SILENT_S
from kvconnector.transports.round_trips import shortest_round_trip_s

# A connection of a silent peer that is still open after this many seconds is shut down. The process
# may be stopped, or another process on its host may own the connection and must then reconnect.
CLOSE_AFTER_S = 5.0
# After this many reads and seconds, all bytes that had arrived are read (`DeadPeers` says why).
FINAL_READS, FINAL_S = 10, 0.5
# Maximum number of peers whose last message's time is remembered, including peers that reconnect
MAX_NAMES = 4096
LOOK_S = 0.1  # minimum seconds between two looks at the connections of one peer
TRIPS_S, UNKNOWN_S = 10.0, 1.0  # seconds after which known and unknown round trips are read again
# Family and address, as in the metadata of a UCX worker
_FAMILIES = {4: bytes([socket.AF_INET]), 6: bytes([socket.AF_INET6])}


@dataclass(slots=True)
class _Fence:
    """The connections of one silent peer.

    Attributes:
        inodes: sockets that were open at the time ``began_at`` and may still be open.
        looked_at: when the connections were last looked at.
        closed_at, num_reads: when all were closed, and the number of reads until then; -1: not yet.
    """

    inodes: set[int]
    began_at: float
    looked_at: float = 0.0
    closed_at: float = -1.0
    num_reads: int = -1


class _Connection(NamedTuple):
    """A connection of this worker.

    Attributes:
        address: remote address with its family; empty: unknown.
        own_end, far_end: addresses with ports; both None if one is unknown.
    """

    address: bytes
    own_end: tuple[Any, ...] | None = None
    far_end: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """The sockets of one UCX worker.

    Attributes:
        list_all: returns the descriptors of the worker's sockets by inode; may raise OSError.
        clock: returns monotonic seconds.
    """

    list_all: Callable[[], Mapping[int, int]]
    clock: Callable[[], float] = time.monotonic


class ConnectionFences:
    """Watches the TCP connections of one UCX worker."""

    def __init__(self, sockets: WorkerSockets) -> None:
        self._list_sockets, self._clock = sockets.list_all, sockets.clock
        self._heard_at: dict[str, float] = {}
        self._fences: dict[str, _Fence] = {}
        # By address: the metadata in which the last look found the address. This saves time,
        # because each look checks each connection, and hundreds of peers may be known.
        self._found_in: dict[bytes, bytes] = {}
        self._num_reads = 0

    def note_read(self, senders: Collection[str], known: Collection[str]) -> None:
        """Count a read of all sockets, which has found messages of these senders."""
        self._num_reads += 1
        for name in senders:
            if name in known:  # a process that is no peer can claim any number of names
                self._heard_at.pop(name, None)
                self._heard_at[name] = self._clock()
                self._fences.pop(name, None)
        while len(self._heard_at) > MAX_NAMES:  # later, the forgotten peer's silence starts anew
            oldest = next(iter(self._heard_at))
            del self._heard_at[oldest]
            self._fences.pop(oldest, None)

    def is_closed(self, name: str, own: bytes, others: Iterable[bytes]) -> bool:
        """Return whether no byte that a peer has sent so far can arrive any more.

        Args:
            own: the peer's metadata.
            others: the metadata of all other known peers.
        """
        now = self._clock()
        if now - self._heard_at.setdefault(name, now) < SILENT_S:
            return False
        fence = self._fences.get(name)
        if fence is None or now - fence.looked_at >= LOOK_S:
            found = self._sockets_of(own, list(others))
            if fence is None:
                fence = self._fences[name] = _Fence(set(found), now)
            fence.looked_at = now
            self._look(fence, found, now)
        num_reads = self._num_reads - fence.num_reads
        is_closed = fence.closed_at >= 0
        return is_closed and num_reads >= FINAL_READS and now - fence.closed_at >= FINAL_S

    def _look(self, fence: _Fence, found: Mapping[int, int], now: float) -> None:
        """Note which of a silent peer's connections are closed; shut down those open for long.

        Args:
            found: descriptors of the peer's sockets that are open now, by inode.
        """
        fence.inodes &= set(found)
        if fence.inodes and now - fence.began_at >= CLOSE_AFTER_S:
            for inode in fence.inodes:
                _shut_down(found[inode], inode)
        elif not fence.inodes and fence.closed_at < 0:
            fence.closed_at, fence.num_reads = now, self._num_reads

    def _sockets_of(self, own: bytes, others: Iterable[bytes]) -> dict[int, int]:
        """Return the descriptors of a peer's sockets by inode."""
        found, others, found_before = {}, dict.fromkeys(others), self._found_in
        self._found_in = {}
        sockets = self._list_sockets()
        connections = {inode: _connection_of(number) for inode, number in sockets.items()}
        far_ends = {one.own_end: one.far_end for one in connections.values() if one is not None}
        for inode, number in sockets.items():
            connection = connections[inode]
            if connection is None:  # a listening socket
                continue
            own_end, address = connection.own_end, connection.address
            if own_end is not None and far_ends.get(connection.far_end) == own_end:
                continue  # this worker's connection with itself
            if not address or address in own:
                found[inode] = number
                continue
            last = self._found_in.get(address) or found_before.get(address)
            if last not in others:
                last = next((one for one in others if address in one), None)
            if last is None:
                found[inode] = number
            else:
                self._found_in[address] = last
        return found


def watched_sockets(descriptor: int) -> dict[int, int]:
    """Return the descriptors that an epoll instance watches, by inode; raises OSError."""
    found = {}
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("tfd:"):
            words = line.replace(":", " ").split()
            found[int(words[words.index("ino") + 1], 16)] = int(words[1])
    return found


def _connection_of(number: int) -> _Connection | None:
    """Return a socket's connection; None: the socket listens."""
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            own_end, far_end = copy.getsockname(), copy.getpeername()
            address = ip_address(far_end[0].partition("%")[0])
    except (OSError, ValueError):  # also a connection that was reset, which may hold unread bytes
        return _Connection(b"")
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return _Connection(_FAMILIES[address.version] + address.packed, own_end, far_end)


class RoundTrips:
    """The shortest round trips of one UCX worker's TCP paths, by remote address."""

    def __init__(self, sockets: WorkerSockets) -> None:
        self._list_sockets, self._clock = sockets.list_all, sockets.clock
        self._read_at = -math.inf
        self._by_address: dict[bytes, float] = {}
        self._by_metadata: dict[bytes, float] = {}  # results of `find` since the last reading

    def find(self, metadata: bytes) -> float:
        """Return the shortest round trip to a peer, by the peer's metadata; 0.0: unknown.

        All sockets are read again after `TRIPS_S`, or after `UNKNOWN_S` if the last reading has not
        found the peer's round trip.
        """
        age_s = self._clock() - self._read_at
        if age_s >= TRIPS_S or (age_s >= UNKNOWN_S and not self._look_up(metadata)):
            self._read()
        return self._look_up(metadata)

    def _look_up(self, metadata: bytes) -> float:
        """Return the round trip to a peer as of the last reading; 0.0: unknown."""
        if metadata not in self._by_metadata:
            found = [trip_s for address, trip_s in self._by_address.items() if address in metadata]
            self._by_metadata[metadata] = min(found, default=0.0)
        return self._by_metadata[metadata]

    def _read(self) -> None:
        self._read_at = self._clock()
        self._by_address, self._by_metadata = {}, {}
        for number in self._list_sockets().values():
            connection = _connection_of(number)
            if connection is None or not connection.address:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if trip_s := shortest_round_trip_s(copy):
                    shortest = self._by_address.get(connection.address, trip_s)
                    self._by_address[connection.address] = min(shortest, trip_s)


def _shut_down(number: int, inode: int) -> None:
    """Shut down a connection, unless its descriptor now belongs to another file."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        if os.fstat(copy.fileno()).st_ino == inode:
            copy.shutdown(socket.SHUT_RDWR)
