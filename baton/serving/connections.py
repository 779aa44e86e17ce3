"""Listener: accepts TCP connections for a protocol, within limits and with timeouts.

The listener accepts connections itself, so that limits apply before the TLS handshake. It knows no
HTTP, so the server tells it when a connection is at work (has an open request).

    accepted -> waits for a first request -> at work <-> idle
                                             (or cut off, if the peer does not read)

If there is no room, connections that are not at work are closed to accept new ones, so idle and
half-open connections keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import cast

from baton.access.exposure import split_address
from baton.api.errors import ConfigError
from baton.processes.ticks import next_tick
from baton.serving.connection_limits import ConnectionCounts, ConnectionLimits

logger = logging.getLogger(__name__)

_BACKLOG = 512
_SWEEP_INTERVAL_S = 0.5
_NO_ROOM_PAUSE_S = 0.1
# Errors that are ignored, because a name may have addresses of a family that the machine lacks.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ANY_IPV6 = "::"
_MAPPED = "::ffff:"  # prefix of an IPv4 address on a socket for IPv6 and IPv4
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Seconds between two log lines about an address, and maximum number of addresses to remember.
_TELL_AGAIN_S, _MAX_TOLD = 60.0, 100
# Maximum number of bytes read from a connection at a time. asyncio's own 256 KiB would block the
# loop for half a second if they came as chunks of one byte.
_READ_BYTES = 2**14
_MAX_LOOKED_AT = 64  # maximum number of connections to look at when one must be closed


class Connection(asyncio.BufferedProtocol):
    """One accepted connection, which passes all data to its inner protocol.

    Attributes:
        address: the peer's address without the port.
        waits_since: when the connection began to wait for a request, by the loop's clock.
    """

    def __init__(
        self, listener: Listener, address: str, inner: asyncio.Protocol, sock: socket.socket
    ) -> None:
        self.address = address
        self.inner = inner
        self.waits_since = 0.0
        self.setup: asyncio.Task[None] | None = None
        self._listener = listener
        self._socket = sock
        self._transport: asyncio.Transport | None = None
        self._is_aborted = False
        self._is_lost = False

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes that wait in this process to be sent to the peer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close at once, in any state."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()
            return
        # Setting up a connection is never cancelled, because the event loop would not close its
        # descriptor.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Make the listener forget this connection, which is closed or was never set up."""
        if not self._is_lost:
            self._is_lost = True
            self._listener.forget(self)

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_aborted:
            self.end()
            # This protocol does nothing, because the connection is aborted.
            self.inner = asyncio.Protocol()
            self._transport.abort()
        self.inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._listener.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.inner.data_received(bytes(self._listener.read_buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._listener.note_unsent(self)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._listener.note_sent(self)
        self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.end()
        self.inner.connection_lost(error)


class Listener:
    """Accepts connections on one address, within limits.

    Args:
        make_protocol: makes the inner protocol of each accepted connection.
        limits: limits of all connections.

    Attributes:
        counts: numbers of connections, for metrics.
        read_buffer: buffer into which all connections read, one at a time; the data is copied at
            once.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], limits: ConnectionLimits | None = None
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.counts = ConnectionCounts()
        # asyncio's TLS reads into slices; slices of a memoryview, unlike slices of a bytearray, are
        # no copies.
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self._make_protocol = make_protocol
        self._ssl: ssl.SSLContext | None = None
        self._told_of: dict[str, float] = {}  # address -> time of the last log line about it
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        self._sweep: asyncio.TimerHandle | None = None  # None: no connection has a time limit
        self._of_protocol: dict[asyncio.BaseProtocol, Connection] = {}
        # Waiting connections, the longest waiting first: all of them, and per address.
        self._fresh: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._waiting_of: dict[str, dict[Connection, None]] = {}
        self._num_of: dict[str, int] = {}
        # Connection -> (number of unsent bytes, time when they were counted).
        self._unsent: dict[Connection, tuple[int, float]] = {}

    async def start(
        self,
        option: str,
        listen: str,
        *,
        ssl_context: ssl.SSLContext | None = None,
        reuse_port: bool = False,
    ) -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the address with its port.

        Args:
            option: name of the option, for errors.
            reuse_port: let other processes listen on the same port.

        Raises:
            ConfigError: the address is malformed, or cannot be listened on.
        """
        host, port = split_address(option, listen)
        loop = asyncio.get_running_loop()
        self._ssl = ssl_context
        try:
            self._sockets = await _listen(host.strip("[]"), port, reuse_port=reuse_port)
        except OSError as error:
            # The number of an error is negative if name resolution failed.
            number = error.errno or 0
            why = os.strerror(number).lower() if number > 0 else str(error)
            raise ConfigError(f"{option}: cannot listen on {listen} ({why})") from error
        for sock in self._sockets:
            loop.add_reader(sock, self._accept, sock)
        return f"{host}:{self._sockets[0].getsockname()[1]}"

    def stop_accepting(self) -> None:
        """Accept no new connections; open connections continue. May be called again."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
            sock.close()
        self._sockets = []

    def close(self) -> None:
        """Accept no new connections, and cut off all open ones."""
        self.stop_accepting()
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._of_protocol.values()):
            connection.abort()

    @contextlib.contextmanager
    def working(self, protocol: asyncio.BaseProtocol) -> Iterator[None]:
        """Mark a protocol's connection as at work during one request, and then as idle."""
        connection = self._of_protocol.get(protocol)
        if connection is not None:
            self._stop_waiting(connection)
            self.counts.at_work += 1
        try:
            yield
        finally:
            if connection is not None:
                self.counts.at_work -= 1
                if protocol in self._of_protocol:
                    self._wait(connection, self._idle)

    def address_of(self, protocol: asyncio.BaseProtocol) -> str:
        """Return the address of a protocol's peer, without the port; empty if the peer has gone."""
        connection = self._of_protocol.get(protocol)
        return "" if connection is None else connection.address

    def note_refused(self, protocol: asyncio.BaseProtocol, problem: str) -> None:
        """Count and log a connection that its protocol closes because of what the peer sent."""
        self.counts.refused += 1
        self._warn(self.address_of(protocol), problem)

    # ------------------------------------------------------------------ called by connections

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection from all counts."""
        del self._of_protocol[connection.inner]
        self._stop_waiting(connection)
        self._unsent.pop(connection, None)
        self.counts.open -= 1
        self._num_of[connection.address] -= 1
        if not self._num_of[connection.address]:
            del self._num_of[connection.address]

    def note_unsent(self, connection: Connection) -> None:
        """Note how many unsent bytes a connection has, because they exceed the limit."""
        now = asyncio.get_running_loop().time()
        self._unsent[connection] = (connection.num_unsent_bytes, now)
        self._sweep_later()

    def note_sent(self, connection: Connection) -> None:
        """Note that few enough bytes are unsent, because the peer has read the others."""
        self._unsent.pop(connection, None)

    # ------------------------------------------------------------------ accepting

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_BACKLOG):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._pause(listening, error)
                return
            self._take(sock, _without_mapping(str(address[0])))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Close the oldest waiting connection and pause, because descriptors or memory ran out."""
        logger.warning("cannot accept a connection: %s", error.strerror)
        self._displace(self._oldest(self._fresh, self._idle))
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if listening in self._sockets:
                loop.add_reader(listening, self._accept, listening)

        loop.call_later(_NO_ROOM_PAUSE_S, go_on)

    def _take(self, sock: socket.socket, address: str) -> None:
        if not self._make_room(address):
            self.counts.refused += 1
            sock.close()
            return
        connection = Connection(self, address, self._make_protocol(), sock)
        self._of_protocol[connection.inner] = connection
        self._num_of[address] = self._num_of.get(address, 0) + 1
        self.counts.open += 1
        self.counts.accepted += 1
        self._wait(connection, self._fresh)
        connection.setup = asyncio.create_task(self._set_up(connection, sock))

    def _make_room(self, address: str) -> bool:
        """Return whether there is room for this address; close a waiting connection if needed."""
        limits, of_address = self.limits, self._waiting_of.get(address, {})
        if self._num_of.get(address, 0) >= limits.max_connections_per_address:
            return self._displace(self._oldest(of_address))
        if self.counts.open >= limits.max_connections:
            # A connection of the same address is closed first, so that an address with many
            # connections takes no room from other addresses.
            return self._displace(self._oldest(of_address, self._fresh, self._idle))
        return True

    @staticmethod
    def _oldest(*waiting: dict[Connection, None]) -> Connection | None:
        """Return the connection that has waited longest, of the first group that has one.

        Connections with unsent bytes are skipped. Only a few of each group are looked at.
        """
        for connections in waiting:
            for connection in itertools.islice(connections, _MAX_LOOKED_AT):
                if not connection.num_unsent_bytes:
                    return connection
        return None

    def _displace(self, connection: Connection | None) -> bool:
        if connection is None:
            return False
        self.counts.displaced += 1
        connection.abort()
        connection.end()  # frees its place now, not when the loop sees the close
        return True

    async def _set_up(self, connection: Connection, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self.limits.header_timeout_s if self._ssl else None
        sock.setblocking(False)
        try:
            await loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self._ssl, ssl_handshake_timeout=timeout_s
            )
        # The peer is gone, or it does not speak TLS.
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, ssl.SSLError):
                # Show the problem of a certificate, or OpenSSL's code, such as
                # WRONG_VERSION_NUMBER.
                why = getattr(error, "verify_message", "") or error.reason or "it ended"
                self._warn(connection.address, f"a TLS handshake failed: {why}")
            sock.close()
            connection.end()

    def _warn(self, address: str, problem: str) -> None:
        """Log a client's fault, once a minute per address, for a limited number of addresses."""
        now = asyncio.get_running_loop().time()
        told = {one: at for one, at in self._told_of.items() if now - at < _TELL_AGAIN_S}
        if address not in told and len(told) < _MAX_TOLD:
            told[address] = now
            logger.warning("%s: %s", address, problem)
        self._told_of = told

    # ------------------------------------------------------------------ waiting

    def _wait(self, connection: Connection, among: dict[Connection, None]) -> None:
        connection.waits_since = asyncio.get_running_loop().time()
        among[connection] = None
        self._waiting_of.setdefault(connection.address, {})[connection] = None
        self._sweep_later()

    def _stop_waiting(self, connection: Connection) -> None:
        self._fresh.pop(connection, None)
        self._idle.pop(connection, None)
        of_address = self._waiting_of.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._waiting_of.pop(connection.address, None)

    def _sweep_later(self) -> None:
        """Look at the connections at the next tick, if any of them has a time limit."""
        if (
            self._sweep is not None
            or self._is_closed
            or not (self._fresh or self._idle or self._unsent)
        ):
            return
        limits, loop = self.limits, asyncio.get_running_loop()
        shortest_s = min(limits.header_timeout_s, limits.idle_timeout_s, limits.stall_timeout_s)
        interval_s = min(_SWEEP_INTERVAL_S, shortest_s / 4)
        self._sweep = loop.call_at(next_tick(loop.time(), interval_s), self._end_late)

    def _end_late(self) -> None:
        """Cut off connections whose time is over."""
        self._sweep = None
        limits, now = self.limits, asyncio.get_running_loop().time()
        self._end_waiting(self._fresh, now - limits.header_timeout_s)
        self._end_waiting(self._idle, now - limits.idle_timeout_s)
        self._end_stalled(now)
        self._sweep_later()

    def _end_waiting(self, waiting: dict[Connection, None], since: float) -> None:
        """Cut off connections that have waited since this time or longer."""
        late = list(itertools.takewhile(lambda one: one.waits_since <= since, waiting))
        for connection in late:
            self.counts.timed_out += 1
            connection.abort()
            self._stop_waiting(connection)

    def _end_stalled(self, now: float) -> None:
        for connection, (num_bytes, since) in list(self._unsent.items()):
            left = connection.num_unsent_bytes
            if left < num_bytes:
                self._unsent[connection] = (left, now)
            elif now - since >= self.limits.stall_timeout_s:
                self.counts.stalled += 1
                connection.abort()


def _without_mapping(address: str) -> str:
    """Return an address; an IPv4 address in IPv6 form becomes a plain one."""
    return address[len(_MAPPED) :] if address.startswith(_MAPPED) and "." in address else address


async def _listen(host: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Listen on all addresses of a host, on one port; raises OSError.

    As in gRPC, the host ``::`` means all addresses of IPv6 and IPv4.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )
    takes_both = host == _ANY_IPV6 and socket.has_dualstack_ipv6()
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sock = socket.create_server(
                (address[0], port, *address[2:]),
                family=family,
                backlog=_BACKLOG,
                reuse_port=reuse_port,
                dualstack_ipv6=takes_both,
            )
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                for other in sockets:
                    other.close()
                raise
            missing = error
            continue
        sock.setblocking(False)
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        assert missing is not None
        raise missing
    return sockets
