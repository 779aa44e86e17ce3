"""Unit tests of ConnectionFences, with real TCP connections and a scripted clock."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvconnector.protocol.peers import LEASE_S
from kvconnector.transports.base import SILENT_S
from kvconnector.transports.nixl.fences import (
    CLOSE_AFTER_S,
    FINAL_READS,
    FINAL_S,
    LOOK_S,
    MAX_NAMES,
    TRIPS_S,
    UNKNOWN_S,
    ConnectionFences,
    RoundTrips,
    WorkerSockets,
    watched_sockets,
)


def metadata_of(address: str) -> bytes:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return b"worker" + bytes([family]) + socket.inet_pton(family, address) + b"port"


class Worker:
    """A node's sockets in an epoll instance, with connections from some addresses."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._epoll = stack.enter_context(select.epoll())
        self.now = 100.0
        self.num_lists = 0
        sockets = WorkerSockets(self.list_sockets, lambda: self.now)
        self.fences, self.round_trips = ConnectionFences(sockets), RoundTrips(sockets)

    def list_sockets(self) -> dict[int, int]:
        self.num_lists += 1
        return watched_sockets(self._epoll.fileno())

    def accept(self, address: str) -> tuple[socket.socket, socket.socket]:
        """Return this node's end and the peer's end of a connection from an address."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = self._stack.enter_context(socket.socket(family))
        listener.bind((address if ":" in address else "127.0.0.1", 0))
        listener.listen()
        self._epoll.register(listener)
        theirs = self._stack.enter_context(socket.socket(family))
        theirs.bind((address, 0))
        theirs.connect(listener.getsockname())
        own = self._stack.enter_context(listener.accept()[0])
        self._epoll.register(own)
        return own, theirs

    def watch(self, connection: socket.socket) -> None:
        self._epoll.register(connection)

    def read(self, *senders: str) -> None:
        self.fences.note_read(senders, {"p", "q"})

    def look(self, seconds: float, own: str, *others: str) -> bool:
        self.now += seconds
        return self.fences.is_closed("p", metadata_of(own), [metadata_of(one) for one in others])

    def read_to_the_end(self) -> None:
        for _ in range(FINAL_READS):
            self.read()
        self.now += FINAL_S


@pytest.fixture
def worker() -> Iterator[Worker]:
    with ExitStack() as stack:
        yield Worker(stack)


def test_silence_is_longer_than_a_lease_with_room_for_slow_clocks() -> None:
    assert SILENT_S >= 1.5 * LEASE_S


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_a_silent_peer_is_cut_off_once_its_connection_is_closed_and_read(
    worker: Worker, address: str
) -> None:
    own, _ = worker.accept(address)
    worker.read("p")
    assert not worker.look(SILENT_S - 0.1, address)  # not silent for long enough
    own.close()
    assert not worker.look(0.2, address)  # the closed connection is noticed
    worker.now += FINAL_S
    assert not worker.look(0, address)  # nothing was read since
    worker.read_to_the_end()
    assert worker.look(0, address)


def test_an_open_connection_of_a_silent_peer_is_shut_down(worker: Worker) -> None:
    own, theirs = worker.accept("127.0.0.2")
    worker.read("p")
    worker.look(SILENT_S, "127.0.0.2")
    worker.read_to_the_end()
    assert not worker.look(2 * LOOK_S, "127.0.0.2")
    assert not worker.look(CLOSE_AFTER_S, "127.0.0.2")
    assert theirs.recv(1) == b""
    own.close()  # as the worker does after it has read the end
    worker.look(2 * LOOK_S, "127.0.0.2")
    worker.read_to_the_end()
    assert worker.look(2 * LOOK_S, "127.0.0.2")


def test_connections_of_other_hosts_and_later_ones_do_not_count(worker: Worker) -> None:
    _, theirs = worker.accept("127.0.0.3")
    worker.read("p")
    assert not worker.look(SILENT_S, "127.0.0.2", "127.0.0.3")
    _, later = worker.accept("127.0.0.2")  # a new process on the peer's host
    worker.read_to_the_end()
    worker.now += CLOSE_AFTER_S
    assert worker.look(0, "127.0.0.2", "127.0.0.3")
    for one in (theirs, later):
        one.settimeout(0)
        with pytest.raises(BlockingIOError):  # still open
            one.recv(1)


@pytest.mark.parametrize("others", [(), ("127.0.0.2",)])
def test_a_connection_that_may_be_the_peers_counts(worker: Worker, others: tuple[str]) -> None:
    """Count a connection whose address is no known peer's, or two peers'."""
    own = "127.0.0.2" if others else "127.0.0.9"
    worker.accept("127.0.0.2")
    worker.read("p")
    worker.look(SILENT_S, own, *others)
    worker.read_to_the_end()
    assert not worker.look(2 * LOOK_S, own, *others)


def test_a_connection_that_was_reset_counts_until_it_is_closed(worker: Worker) -> None:
    """Bytes that arrived before the reset can still be read."""
    own, theirs = worker.accept("127.0.0.2")
    theirs.send(b"bytes")
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    theirs.close()
    worker.read("p")
    worker.look(SILENT_S, "127.0.0.2", "127.0.0.2")
    worker.read_to_the_end()
    assert not worker.look(2 * LOOK_S, "127.0.0.2", "127.0.0.2")
    assert own.recv(5) == b"bytes"


def test_a_message_ends_the_silence(worker: Worker) -> None:
    own, _ = worker.accept("127.0.0.2")
    worker.read("p")
    own.close()
    worker.look(SILENT_S, "127.0.0.2")
    worker.read_to_the_end()
    worker.read("p")
    assert not worker.look(2 * LOOK_S, "127.0.0.2")


def test_a_peer_that_was_never_heard_is_silent_from_the_first_question(worker: Worker) -> None:
    assert not worker.look(0, "127.0.0.2")
    assert not worker.look(SILENT_S, "127.0.0.2")
    worker.read_to_the_end()
    assert worker.look(0, "127.0.0.2")


def test_names_of_strangers_are_not_remembered_and_names_of_peers_up_to_a_limit() -> None:
    fences = ConnectionFences(WorkerSockets(dict, lambda: 0.0))
    fences.note_read(["stranger"], {"p"})
    names = {str(number) for number in range(2 * MAX_NAMES)}
    fences.note_read(names, names)
    assert len(fences._heard_at) == MAX_NAMES
    assert "stranger" not in fences._heard_at


def test_only_an_epoll_instance_lists_its_sockets() -> None:
    read, write = os.pipe()
    assert watched_sockets(read) == {}
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match="No such file"):
        watched_sockets(read)


def test_looks_do_not_search_all_metadata_for_each_connection(worker: Worker) -> None:
    num_searches = 0

    class Counted(bytes):
        __hash__ = bytes.__hash__

        def __contains__(self, key: object) -> bool:
            nonlocal num_searches
            num_searches += 1
            return super().__contains__(key)  # type: ignore[operator]

    addresses = [f"127.0.1.{number}" for number in range(1, 41)]
    ends = [worker.accept(address) for address in addresses]
    others = [Counted(metadata_of(address)) for address in addresses]
    own = metadata_of("127.0.0.2")
    for _ in range(12):
        worker.now += SILENT_S
        worker.fences.is_closed("p", own, others)
    assert 0 < num_searches <= len(ends) * len(others)


def test_an_address_that_moves_to_the_silent_peer_is_its_own(worker: Worker) -> None:
    worker.accept("127.0.0.3")
    worker.read("p")
    assert not worker.look(SILENT_S, "127.0.0.2", "127.0.0.3")
    worker.read("p")
    assert not worker.look(SILENT_S, "127.0.0.2")  # nobody else has the address any more
    worker.read_to_the_end()
    assert not worker.look(LOOK_S, "127.0.0.2")


def test_a_workers_connection_with_itself_is_no_peers(worker: Worker) -> None:
    own, theirs = worker.accept("127.0.0.2")
    worker.watch(theirs)
    assert not worker.look(0.0, "127.0.0.9")
    for _ in range(2):  # also after the time in which all other connections are shut down
        assert not worker.look(SILENT_S + CLOSE_AFTER_S, "127.0.0.9")
        worker.read_to_the_end()
        assert worker.look(0.0, "127.0.0.9")
        worker.read("p")
    theirs.send(b"still open")
    assert own.recv(100) == b"still open"


def test_a_peer_that_has_this_workers_address_is_not_taken_for_the_worker(worker: Worker) -> None:
    worker.accept("127.0.0.1")
    assert not worker.look(0.0, "127.0.0.9")
    assert not worker.look(SILENT_S, "127.0.0.9")
    worker.read_to_the_end()
    assert not worker.look(0.0, "127.0.0.9")


def test_the_kernel_tells_the_round_trip_to_a_peer(worker: Worker) -> None:
    own, theirs = worker.accept("127.0.0.2")
    worker.accept("127.0.0.3")
    own.send(b"answer")  # the kernel measures the time until the other end acknowledges
    assert theirs.recv(6) == b"answer"
    metadata = metadata_of("127.0.0.2")
    found = worker.round_trips.find(metadata)
    assert 0 < found < 1
    assert worker.round_trips.find(metadata_of("127.0.0.9")) == 0.0
    num_lists = worker.num_lists
    other, far = worker.accept("127.0.0.4")
    other.send(b"answer")
    assert far.recv(6) == b"answer"
    worker.now += UNKNOWN_S
    assert worker.round_trips.find(metadata) == found
    assert worker.num_lists == num_lists, "known: the sockets are not read again"
    assert worker.round_trips.find(metadata_of("127.0.0.4")) > 0
    num_lists += 1
    for address in ("127.0.0.2", "127.0.0.4") * 2:  # both were found by the last reading
        worker.now += UNKNOWN_S
        assert worker.round_trips.find(metadata_of(address)) > 0
    assert worker.num_lists == num_lists
    assert worker.round_trips.find(metadata_of("127.0.0.9")) == 0.0
    worker.now += TRIPS_S
    worker.round_trips.find(metadata)
    assert worker.num_lists == num_lists + 2
