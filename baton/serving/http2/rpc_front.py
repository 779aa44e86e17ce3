"""RpcFront: accepts a gRPC server's connections, and passes on what `FrameGuard` lets through.

    client --TCP, or TLS--> Listener -> FrameGuard --private socket--> gRPC's core
           <------------------------ unchanged -------------------------

gRPC's core parses what a client sends before any code of Baton runs, and has no limits for much of
what it parses. Only this user can open the folder of the private socket. gRPC learns a client's
address from the name of this process's end of the connection to the private socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import ssl
import tempfile
from pathlib import Path
from typing import cast

from baton.api.errors import ConfigError
from baton.processes.held_folder import HeldFolder
from baton.serving.connection_limits import ConnectionLimits, RpcLimits
from baton.serving.connections import Listener
from baton.serving.http2.call_pace import CallPace
from baton.serving.http2.frames import FrameGuard, Hold, Http2Error, cancel_frame, goodbye

logger = logging.getLogger(__name__)

# Bytes of the longest name of a connection to the private socket: an IPv6 address and a number.
_MAX_NAME_CHARS = 60
_PREFIX = "baton-rpc-"
# Bytes of the longest path of the folder; macOS allows 104 characters for a socket's whole path,
# Linux 108.
_MAX_PATH_CHARS = 104 - _MAX_NAME_CHARS
_RATE_PAUSE_S = 0.05
_CLOSE_TIMEOUT_S = 1.0
_MAX_SENT_BYTES = 2**17  # if more bytes wait for the client, gRPC must wait
_FEW_STREAMS = 16  # maximum number of calls that gRPC cancels at once
# Maximum number of bytes read after a call that waits for its turn, to find frames that may
# overtake it.
_MAX_HELD_BYTES = 2**18


class RpcFront:
    """The public side of one gRPC server, which accepts its connections.

    Args:
        limits: limits of the server's connections.
        tls: TLS context for the clients' connections; None: no TLS.

    Raises:
        ConfigError: no folder can be made for the private socket.
    """

    def __init__(self, limits: RpcLimits, tls: ssl.SSLContext | None = None) -> None:
        self.pace = CallPace()
        self._tls = tls
        self._folder = _make_folder()
        self._numbers = itertools.count()
        self._sides: set[_ClientSide] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.listener = Listener(
            lambda: _ClientSide(self),
            ConnectionLimits(
                max_connections=limits.max_connections,
                max_connections_per_address=limits.max_connections,
                header_timeout_s=limits.handshake_timeout_s,
                idle_timeout_s=limits.idle_timeout_s,
                stall_timeout_s=limits.stall_timeout_s,
            ),
        )

    @property
    def private_address(self) -> str:
        """Address for the gRPC server to listen on."""
        return f"unix:{self._path}"

    @property
    def _path(self) -> str:
        return f"{self._folder.path}/grpc"

    async def start(self, listen: str, *, reuse_port: bool = False) -> str:
        """Listen on ``host:port`` (port 0: any free one) and return the address with its port.

        Raises:
            ConfigError: the address is malformed, or cannot be listened on.
        """
        return await self.listener.start(
            "listen", listen, ssl_context=self._tls, reuse_port=reuse_port
        )

    def stop_accepting(self) -> None:
        """Accept no new connections; open connections continue."""
        self.listener.stop_accepting()

    async def close(self) -> None:
        """Cut off all connections and remove the private socket."""
        self.listener.close()
        self.pace.close()
        for side in list(self._sides):
            side.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._is_empty.wait()
        self._folder.close()

    def add(self, side: _ClientSide) -> None:
        """Remember a connection that was set up."""
        self._sides.add(side)
        self._is_empty.clear()

    def remove(self, side: _ClientSide) -> None:
        """Forget a client's connection once it and its connection to gRPC are closed."""
        self._sides.discard(side)
        if not self._sides:
            self._is_empty.set()

    def connect(self, address: str) -> socket.socket:
        """Connect to the private socket, under a name with the client's address; raises OSError.

        Args:
            address: the client's IP address, without a port.
        """
        name = f"{self._folder.path}/[{address}]:{next(self._numbers)}"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.bind(name)
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        finally:
            with contextlib.suppress(OSError):
                Path(name).unlink()
        return sock


class _ClientSide(asyncio.Protocol):
    """A client's connection, whose frames pass the guard before they go to gRPC.

    If gRPC does not read, or if small frames come too fast, nothing more is read from the client.
    While a call waits for its turn, a few more bytes are read, to find frames that may overtake the
    call. While the client does not read, none of its calls begins.
    """

    def __init__(self, front: RpcFront) -> None:
        loop = asyncio.get_running_loop()
        self._front = front
        self._guard = FrameGuard(self._may_open, loop.time)
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unsent = b""  # bytes that wait for the connection to gRPC
        self._is_client_full = self._is_server_full = False
        self._has_turn = self._waits_turn = self._is_refused = False
        self._at_work = contextlib.ExitStack()

    # ------------------------------------------------------------------ called by the client's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.Transport, transport)
        self._client.set_write_buffer_limits(_MAX_SENT_BYTES)
        self._front.add(self)

    def data_received(self, data: bytes) -> None:
        self._pass_on(data)

    def pause_writing(self) -> None:
        self._is_client_full = True
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        self._is_client_full = False
        if self._server is not None:
            self._server.resume_reading()
        if self._guard.hold is Hold.CALL:
            self._pass_on(b"")

    def connection_lost(self, error: Exception | None) -> None:
        self._client = None
        self._at_work.close()
        if self._server is not None:
            self._cancel_calls()
        elif self._connecting is None:
            self._front.remove(self)

    # ------------------------------------------------------------------ called by gRPC's side

    def connected_to_server(self, transport: asyncio.Transport) -> None:
        """Send the bytes that waited for the connection to gRPC."""
        self._server = transport
        if self._client is None:
            transport.abort()
            return
        transport.write(self._unsent)
        self._unsent = b""
        self._read_or_pause()

    def send(self, data: bytes) -> None:
        """Send gRPC's bytes to the client."""
        self._guard.note_sent(len(data))
        if self._client is not None:
            self._client.write(data)

    def pause_passing(self, is_full: bool) -> None:
        """Stop reading from the client while gRPC's buffers are full; otherwise continue."""
        self._is_server_full = is_full
        self._read_or_pause()

    def end(self) -> None:
        """Close the client's connection once all bytes are sent: gRPC has closed its side."""
        self._server = None
        if self._client is not None:
            self._client.close()
            # The connection now counts as idle; it is closed if the client does not read
            self._at_work.close()
        self._front.remove(self)

    def abort(self) -> None:
        """Close the connections to the client and to gRPC at once."""
        for transport in (self._client, self._server):
            if transport is not None:
                transport.abort()

    # ------------------------------------------------------------------ passing on

    def _pass_on(self, data: bytes) -> None:
        if self._client is None or self._is_refused:
            return
        try:
            passed = self._guard.feed(data)
        except Http2Error as error:
            self._refuse(str(error))
            return
        if self._server is not None:
            if passed:
                self._server.write(passed)
        elif self._guard.is_up:
            self._unsent += passed
            self._connect()
        else:
            self._unsent += passed
        self._wait_if_held()
        self._read_or_pause()

    def _wait_if_held(self) -> None:
        """If frames are held back, arrange to check them again when they may pass."""
        if self._guard.hold is Hold.RATE:
            loop = asyncio.get_running_loop()
            loop.call_later(_RATE_PAUSE_S, self._pass_on, b"")
        elif self._guard.hold is Hold.CALL and not (self._is_client_full or self._waits_turn):
            self._waits_turn = True
            self._front.pace.wait_turn(self._use_turn)

    def _use_turn(self) -> None:
        self._waits_turn, self._has_turn = False, True
        self._pass_on(b"")
        self._has_turn = False

    def _may_open(self) -> bool:
        if self._is_client_full:
            return False
        if self._has_turn:
            self._has_turn = False
            return True
        return self._front.pace.take_turn()

    def _read_or_pause(self) -> None:
        if self._client is None:
            return
        is_ready = self._server is not None or not self._guard.is_up
        hold, num_held_bytes = self._guard.hold, self._guard.num_held_bytes
        may_read = hold is None or (hold is Hold.CALL and num_held_bytes < _MAX_HELD_BYTES)
        if is_ready and not self._is_server_full and may_read:
            self._client.resume_reading()
        else:
            self._client.pause_reading()

    def _refuse(self, why: str) -> None:
        """Close a connection whose frames break a rule."""
        assert self._client is not None
        self._is_refused = True
        self._front.listener.note_refused(self, f"a connection to gRPC is closed: it {why}")
        if self._connecting is None:  # nothing was sent yet, so this cuts no frame in two
            self._client.write(goodbye(why))
            self._client.close()
        else:
            self._client.abort()

    # ------------------------------------------------------------------ a client that is gone

    def _cancel_calls(self) -> None:
        """Cancel the calls of a client that is gone, in turns; then close gRPC's side.

        If the connection were closed first, gRPC would cancel all calls at once, which stops the
        event loop for seconds if there are thousands.
        """
        if self._server is None:
            return
        streams = self._guard.streams
        if len(streams) <= _FEW_STREAMS:
            self._server.abort()
            return
        self._server.write(cancel_frame(streams.pop()))
        self._front.pace.wait_turn(self._cancel_calls)

    # ------------------------------------------------------------------ the connection to gRPC

    def _connect(self) -> None:
        if self._connecting is None:
            listener = self._front.listener
            self._at_work.enter_context(listener.working(self))
            address = listener.address_of(self)
            self._connecting = asyncio.create_task(self._connect_to_server(address))

    async def _connect_to_server(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock = self._front.connect(address)
            await loop.create_unix_connection(functools.partial(_ServerSide, self), sock=sock)
        except OSError as error:  # no descriptor is left, or the server has stopped
            logger.warning("a connection to gRPC is closed: %s", error.strerror)
            self.abort()
            self._front.remove(self)


class _ServerSide(asyncio.Protocol):
    """The connection to gRPC on behalf of one client's connection."""

    def __init__(self, client: _ClientSide) -> None:
        self._client = client
        self.data_received = client.send  # type: ignore[method-assign]  # saves a call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.connected_to_server(cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        self._client.pause_passing(True)

    def resume_writing(self) -> None:
        self._client.pause_passing(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.end()


def _make_folder() -> HeldFolder:
    """Make the folder of the private socket, which only this user can open; raises ConfigError."""
    problem = "no folder for temporary files can be found"
    for parent in _parents():
        if len(f"{parent}/{_PREFIX}12345678") > _MAX_PATH_CHARS:
            continue
        try:
            return HeldFolder(_PREFIX, parent)
        except OSError as error:
            problem = f"{parent}: {error.strerror}"
    raise ConfigError(f"listen: gRPC needs a folder for a socket, and none can be made ({problem})")


def _parents() -> list[str]:
    with contextlib.suppress(OSError):
        return [tempfile.gettempdir(), "/dev/shm", "/tmp"]
    return ["/dev/shm"]
