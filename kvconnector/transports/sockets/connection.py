"""Connection: one TLS connection that never blocks; it sends a queue and reads frames.

The owner tells a connection when it can read or write. Refuses to know: peers, blocks.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable

from baton.api.errors import TransferError
from kvconnector.transports.sockets.frames import Frame, FrameReader, cut_parts

# bytes per encrypting call; the call releases the GIL, and other threads run between calls
PIECE_BYTES = 2**18
# Maximum number of bytes that one connection reads, and sends, before another connection's turn.
ROUND_BYTES = 4 * 2**20


class Connection:
    """An open TCP connection with TLS; `progress` does the TLS handshake.

    Args:
        raw: connected socket; non-blocking; the connection closes it.
        context: TLS context of the connection.
        is_server: whether the connection was accepted; false: this node dialled.
        reader: receives the bytes.
        on_frame: called for each frame; may raise FrameError.
        now: time at which the connection was made.

    Attributes:
        is_secure: whether the TLS handshake is done, which proves the other end's identity.
        is_ready: whether the owner has seen bytes to read, or room to write.
        problem: why the connection has ended; empty while the connection is open.
        made_at: time at which the connection was made.
        sent_bytes: bytes encrypted with this connection's keys.
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
        """Return the number of bytes that the kernel has not accepted yet."""
        return self._queued_bytes

    @property
    def wants_write(self) -> bool:
        """Return whether the connection waits for room in the kernel's send buffer."""
        return self._wants_write

    @property
    def has_more(self) -> bool:
        """Return whether more can be read or sent without waiting for the peer."""
        waits_for_peer = self._wants_write or self.problem
        return self._has_more or (bool(self._queue) and self.is_secure and not waits_for_peer)

    def post(self, *parts: memoryview | bytes) -> None:
        """Queue bytes without a copy; their memory must not change until they are sent."""
        self._queue += cut_parts(parts, PIECE_BYTES)
        self._queued_bytes += sum(map(len, parts))

    def progress(self) -> None:
        """Read and send as much as possible without waiting, for one turn."""
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
        """Send as much as possible without waiting."""
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
                # first.
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
        """Tell the other end that no more bytes follow; bytes sent before still arrive."""
        if not self.problem:
            try:
                # SSLSocket's own method would drop the keys, but the other end may still send.
                socket.socket.shutdown(self.socket, socket.SHUT_WR)
            except (OSError, ValueError) as error:
                self.close(describe(error))

    def close(self, problem: str) -> None:
        """Close the connection; repeated calls are harmless."""
        if not self.problem:
            self.problem = problem
        if self._socket is not None:
            self._socket.close()
        self._queue.clear()
        self._queued_bytes = 0


def describe(error: Exception) -> str:
    """Return a description of an error for a log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
