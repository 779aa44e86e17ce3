"""Connection: one TLS connection that never blocks; it sends queued bytes and reads frames.

TLS encrypts to memory and decrypts from memory, so that one system call sends or reads many TLS
records. The owner polls the sockets, and sets ``is_ready`` when a connection can read or write.
Refuses to know: peers, blocks.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable

from baton.api.errors import TransferError
from kvconnector.transports.base import UNACKNOWLEDGED_S
from kvconnector.transports.sockets.frames import Frame, FrameReader, cut_parts

# Maximum number of bytes per call that encrypts; other threads can run during and between the calls
PIECE_BYTES = 2**19
# Maximum number of bytes that one call reads from the kernel. Many TLS records per system call cost
# a core less than one record per call.
READ_BYTES = 2**19
# Maximum number of bytes that one connection sends, and that it reads, per turn; then messages are
# handled, and other connections have their turn.
ROUND_BYTES = 2**20
# Maximum number of frames that one connection reads per turn: many short frames take long
ROUND_FRAMES = 2**10


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
        raw: the TCP socket, to poll.
        tls: the TLS state, which knows the other end's certificate.
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
        self.raw = raw
        self._on_frame = on_frame
        self._queue: deque[memoryview | bytes] = deque()
        self._queued_bytes = 0
        # Encrypted bytes that the kernel has not accepted yet
        self._encrypted = memoryview(b"")
        self._received = memoryview(bytearray(READ_BYTES))
        self._wants_write = False
        self._has_more = False
        self._frames_left = ROUND_FRAMES  # number of frames that this turn may still read
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.address = "?"
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                limit_ms = 1000 * UNACKNOWLEDGED_S
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
            host, port = raw.getpeername()[:2]
            self.address = f"{host}:{port}"
        except OSError as error:
            self.close(describe(error))
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        # typeshed says `bytes`, but with a buffer `read` returns a number of bytes
        self._read_tls: Callable[[int, memoryview], int] = self.tls.read  # type: ignore[assignment]

    @property
    def queued_bytes(self) -> int:
        """Return the number of queued bytes that the kernel has not accepted yet."""
        return self._queued_bytes + len(self._encrypted)

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
        if self.problem or not (self.is_ready or self.has_more):
            return
        self.is_ready = self._has_more = self._wants_write = False
        try:
            if self.is_secure:
                self._send()
                self._receive()
            else:
                self._shake_hands()
        except (OSError, ValueError, TransferError) as error:
            self.close(describe(error))

    def flush(self) -> None:
        """Send as much as one turn allows, without waiting."""
        if self.is_secure and not self.problem and not self._wants_write:
            try:
                self._send()
            except (OSError, ValueError) as error:
                self.close(describe(error))

    def _send(self) -> None:
        """Encrypt queued bytes and give them to the kernel, until it accepts no more."""
        num_sent = 0
        while self._send_encrypted() and self._queue and num_sent < ROUND_BYTES:
            piece = self._queue.popleft()
            self.tls.write(piece)
            self._queued_bytes -= len(piece)
            self.sent_bytes += len(piece)
            num_sent += len(piece)
            self._take_encrypted()
        self._has_more |= bool(self._queue) and not self._wants_write

    def _take_encrypted(self) -> None:
        """Collect the encrypted bytes that TLS has made for the other end."""
        if self._outgoing.pending:
            made = self._outgoing.read()
            self._encrypted = memoryview(bytes(self._encrypted) + made if self._encrypted else made)

    def _send_encrypted(self) -> bool:
        """Give encrypted bytes to the kernel; return whether it has accepted all of them."""
        while self._encrypted:
            try:
                num_sent = self.raw.send(self._encrypted)
            except BlockingIOError:
                self._wants_write = True
                return False
            self._encrypted = self._encrypted[num_sent:]
        return True

    def _shake_hands(self) -> None:
        """Continue the TLS handshake. The owner checks the identity before a frame is read."""
        try:
            while True:
                try:
                    self.tls.do_handshake()
                except ssl.SSLWantReadError:
                    if self._read_from_kernel() == 0:
                        return
                else:
                    self.is_secure = self._has_more = True
                    return
        finally:
            # After a failed handshake, TLS has an alert that tells the other end the reason
            if not self.problem:
                self._take_encrypted()
                self._send_encrypted()

    def _receive(self) -> None:
        """Read frames until no more bytes have arrived, or this turn is over."""
        self._frames_left = ROUND_FRAMES
        # Bytes that came with the end of the handshake, or that the last turn left
        if self._incoming.pending or self.tls.pending():
            self._decrypt()
        num_received = 0
        while num_received < ROUND_BYTES and self._frames_left and not self.problem:
            num_read = self._read_from_kernel()
            if num_read:
                self._decrypt()
            if num_read < READ_BYTES and self._frames_left:
                return
            num_received += num_read
        self._has_more = True

    def _read_from_kernel(self) -> int:
        """Read bytes to decrypt; return their number; 0: no bytes have arrived, or none follow."""
        try:
            num_read = self.raw.recv_into(self._received)
        except BlockingIOError:
            return 0
        if num_read == 0:
            self._close_at_end()
        self._incoming.write(self._received[:num_read])
        return num_read

    def _decrypt(self) -> None:
        """Read frames from the received bytes, as many as this turn may still read."""
        while not self.problem and self._frames_left and self._read_frame_part():
            pass
        if not self.problem and self._outgoing.pending:  # TLS itself answers, e.g. to new keys
            self._take_encrypted()
            self._send_encrypted()

    def _read_frame_part(self) -> bool:
        """Decrypt bytes into the memory for the next part of a frame; return whether it is full."""
        into, num_filled, is_over = self.reader.buffer(), 0, False
        while num_filled < len(into) and not is_over:
            try:
                num_read = self._read_tls(len(into) - num_filled, into[num_filled:])
            except ssl.SSLWantReadError:
                break
            num_filled += num_read
            is_over = num_read == 0
        if num_filled:
            frame = self.reader.advance(num_filled)
            if frame is not None:
                self._frames_left -= 1
                self._on_frame(self, frame)
        if is_over:
            self._close_at_end()
        return num_filled == len(into)

    def _close_at_end(self) -> None:
        amid = " in the middle of a frame" if self.reader.is_amid else ""
        self.close(f"the other end has closed the connection{amid}")

    def end_sending(self) -> None:
        """Tell the other end that no more bytes follow; earlier bytes still arrive."""
        if not self.problem:
            try:
                self.raw.shutdown(socket.SHUT_WR)
            except OSError as error:
                self.close(describe(error))

    def close(self, problem: str) -> None:
        """Close the connection for the reason ``problem``; repeated calls are harmless."""
        if not self.problem:
            self.problem = problem
        self.raw.close()
        self._queue.clear()
        self._queued_bytes = 0
        self._encrypted = memoryview(b"")


def describe(error: Exception) -> str:
    """Return a text that describes an error in logs."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
