"""Connection: one TLS connection that never blocks; it sends queued bytes and reads frames.

The owner polls the sockets, and sets ``is_ready`` when a connection can read or write. Refuses to
know: peers, blocks.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable

from baton.api.errors import TransferError
from kvconnector.transports.base import UNACKNOWLEDGED_S
from kvconnector.transports.sockets.frames import Frame, FrameReader, cut_parts

# bytes per call that encrypts; other threads can run during and between the calls
PIECE_BYTES = 2**18
# Maximum number of bytes that one connection sends, and that it reads, per turn; then other
# connections have their turn.
ROUND_BYTES = 4 * 2**20


class Connection:
    """A TLS connection over an open TCP connection; `progress` does the TLS handshake.

    Args:
        raw: the connected, non-blocking socket; this object closes it.
        context: TLS context of the connection.
        is_server: whether the peer dialled; false: this node dialled.
        reader: assembles frames from the received bytes.
        on_frame: called for each received frame; may raise FrameError.
        now: the present time.

    Attributes:
        is_secure: whether the TLS handshake is done, which proves the other end's identity.
        is_ready: set by the owner if there are bytes to read or room to write.
        problem: why the connection has ended; empty while the connection is open.
        made_at: time at which the connection was made.
        sent_bytes: number of bytes that were encrypted with this connection's keys.
    """

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        *,
        is_server: bool,
        reader: FrameReader,
        on_frame: Callable[[Connection, Frame], None],
        now: float,
    ) -> None:
        self.is_secure = False
        self.is_ready = True
        self.problem = ""
        self.made_at = now
        self.sent_bytes = 0
        self.reader = reader
        self._on_frame = on_frame
        self._queue: deque[memoryview | bytes] = deque()
        self._queued_bytes = 0
        self._wants_write = False
        self._has_more = False
        self._socket: ssl.SSLSocket | None = None
        self.address = "?"
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                limit_ms = 1000 * UNACKNOWLEDGED_S
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            host, port = raw.getpeername()[:2]
            self.address = f"{host}:{port}"
            self._socket = context.wrap_socket(
                raw, server_side=is_server, do_handshake_on_connect=False
            )
        except OSError as error:  # includes SSLError
            raw.close()
            self.problem = describe(error)

    @property
    def socket(self) -> ssl.SSLSocket:
        assert self._socket is not None
        return self._socket

    @property
    def queued_bytes(self) -> int:
        """Return the number of queued bytes that the kernel has not accepted yet."""
        return self._queued_bytes

    @property
    def wants_write(self) -> bool:
        """Return whether the connection waits for room in the kernel's send buffer."""
        return self._wants_write

    @property
    def has_more(self) -> bool:
        """Return whether the connection can read or send more without waiting for the peer."""
        waits_for_peer = self._wants_write or self.problem
        return self._has_more or (bool(self._queue) and self.is_secure and not waits_for_peer)

    def post(self, *parts: memoryview | bytes) -> None:
        """Queue bytes without copying them; their memory must not change until they are sent."""
        self._queue += cut_parts(parts, PIECE_BYTES)
        self._queued_bytes += sum(map(len, parts))

    def progress(self) -> None:
        """Send and read as much as one turn allows, without waiting."""
        if self._socket is None or self.problem or not (self.is_ready or self.has_more):
            return
        self.is_ready = self._has_more = self._wants_write = False
        try:
            if not self.is_secure:
                self._socket.do_handshake()
                self.is_secure = True
            self._send(self._socket)
            self._receive(self._socket)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except (OSError, ValueError, TransferError) as error:
            self.close(describe(error))

    def flush(self) -> None:
        """Send as much as one turn allows, without waiting."""
        if self.is_secure and not self.problem and not self._wants_write:
            try:
                self._send(self.socket)
            except (OSError, ValueError) as error:
                self.close(describe(error))

    def _send(self, sock: ssl.SSLSocket) -> None:
        num_sent = 0
        try:
            while self._queue and num_sent < ROUND_BYTES:
                # After "want write", TLS must be given the same bytes again, so the piece stays
                # first in the queue.
                sent = sock.send(self._queue[0])
                num_sent += sent
                self._queued_bytes -= sent
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = memoryview(self._queue[0])[sent:]
        except ssl.SSLWantWriteError:
            self._wants_write = True
        except ssl.SSLWantReadError:
            pass
        self._has_more |= bool(self._queue) and not self._wants_write
        self.sent_bytes += num_sent

    def _receive(self, sock: ssl.SSLSocket) -> None:
        num_received = 0
        try:
            while num_received < ROUND_BYTES and not self.problem:
                received = sock.recv_into(self.reader.buffer())
                if received == 0:
                    amid = " in the middle of a frame" if self.reader.is_amid else ""
                    self.close(f"the other end has closed the connection{amid}")
                    return
                num_received += received
                frame = self.reader.advance(received)
                if frame is not None:
                    self._on_frame(self, frame)
            self._has_more = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._wants_write = True

    def end_sending(self) -> None:
        """Tell the other end that no more bytes follow; earlier bytes still arrive."""
        if not self.problem:
            try:
                # `SSLSocket.shutdown` would drop the TLS keys, which bytes of the other end still
                # need.
                socket.socket.shutdown(self.socket, socket.SHUT_WR)
            except (OSError, ValueError) as error:
                self.close(describe(error))

    def close(self, problem: str) -> None:
        """Close the connection for the reason ``problem``; repeated calls are harmless."""
        if not self.problem:
            self.problem = problem
        if self._socket is not None:
            self._socket.close()
        self._queue.clear()
        self._queued_bytes = 0


def describe(error: Exception) -> str:
    """Return a text that describes an error in logs."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
