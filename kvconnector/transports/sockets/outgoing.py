"""Outgoing: the connection to one peer, dialled when there is something to send to the peer.

    dialling -> secure -> welcome -> failed          for good: the owner makes a new `Outgoing`
        `---------`----> waits a little, dials again

Before WELCOME, the peer may not know this node yet, because nodes learn of each other at different
times. So this node dials again, keeps its messages, and reports the reason only if dialling keeps
failing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.api.errors import TransferError
from kvconnector.transports.base import QueueFullError
from kvconnector.transports.round_trips import shortest_round_trip_s
from kvconnector.transports.sockets.connection import Connection
from kvconnector.transports.sockets.frames import (
    FROM_LISTENER,
    MAX_HEAD_BYTES,
    DoneHead,
    Frame,
    FrameError,
    FrameReader,
    Head,
    HelloHead,
    Kind,
    Sink,
    encode_frame,
)
from kvconnector.transports.sockets.identity import Identity

DIAL_TIMEOUT_S = 5.0  # seconds after which a dialled connection without a WELCOME has failed
FIRST_BACK_OFF_S = 0.02
MAX_BACK_OFF_S = 1.0
REPORT_S = 1.0  # seconds of failed dialling after which `send` raises the reason
# Maximum number of bytes of queued messages; the sender itself limits the queued blocks
MAX_QUEUED_BYTES = 8 * 2**20
# Messages of at most `SHORT_BYTES` may exceed this maximum by `MAX_SHORT_BYTES`. So there is room
# for beats while long messages, such as Grants of very long prompts, fill the queue.
SHORT_BYTES, MAX_SHORT_BYTES = 2**16, 2**20
# Bytes after which new keys are needed: below the limit of 2^24 full records per TLS 1.3 key (RFC
# 8446, 5.5).
RENEW_BYTES = 2**37


@dataclass(slots=True)
class PostedWrite:
    """A write of blocks or of a probe, posted on the connection to a peer."""

    out: Outgoing
    is_over: bool = False
    is_taken: bool = False

    def is_done(self) -> bool:
        if self.is_over:
            if not self.is_taken:
                raise TransferError("the peer dropped a write that it does not allow any more")
            return True
        if self.out.problem:
            raise TransferError(self.out.problem)
        return False


class Outgoing:
    """The connection to one peer, and the bytes that wait for the connection.

    Args:
        own_id: engine id of this process.
        peer_id: engine id of the peer.
        at: the peer's host and port.
        shown: the identity that the peer must prove.
        identity: this node's identity.
        clock: returns monotonic seconds.
        renew_bytes: number of sent bytes after which the connection is replaced when it is idle, to
            get new TLS keys.

    Attributes:
        problem: why the connection has failed for good; empty: it has not.
        has_ended_write: whether a write has ended since the owner last set this to false.
    """

    def __init__(
        self,
        own_id: str,
        peer_id: str,
        at: tuple[str, int],
        shown: bytes,
        identity: Identity,
        clock: Callable[[], float],
        renew_bytes: int = RENEW_BYTES,
    ) -> None:
        self._hello = encode_frame(Kind.HELLO, HelloHead(own_id, peer_id))
        self._peer_id, self._at, self._shown = peer_id, at, shown
        self._identity = identity
        self._clock = clock
        self._renew_bytes = renew_bytes
        self.problem = ""
        self._raw: socket.socket | None = None  # a TCP connection that is being dialled
        self._connection: Connection | None = None
        # A replaced connection: nothing more is sent over it, but its last bytes may still be on
        # their way.
        self._ended: Connection | None = None
        self._is_welcome = False
        # whether the peer has ever sent WELCOME; if so, the next failure is final
        self._was_welcome = False
        self._dialled_at = self._failing_since = 0.0
        self._retry_at = 0.0
        self._back_off_s = FIRST_BACK_OFF_S
        self._last_failure = ""
        self._waiting: list[memoryview | bytes] = []  # bytes to send after the next WELCOME
        self.has_ended_write = False
        self._num_done = 0  # writes on this connection that are over
        self._writes: deque[PostedWrite] = deque()

    # ------------------------------------------------------------------ for the owner

    def send(self, payload: bytes) -> None:
        """Send a message, or keep it until WELCOME.

        Raises QueueFullError if a long message does not fit the queue, and another TransferError if
        the connection has failed.
        """
        self._check()
        if len(payload) > MAX_HEAD_BYTES:
            raise TransferError(f"a message has {len(payload)} bytes, more than {MAX_HEAD_BYTES}")
        frame = encode_frame(Kind.MESSAGE, payload)
        if self._connection is not None and self._is_welcome:
            self._check_room(self._connection.queued_bytes, len(frame), "reads nothing")
            self._renew()
        if self._connection is not None and self._is_welcome:
            self._connection.post(frame)
            self._connection.flush()
            return
        if self._last_failure and self._clock() - self._failing_since >= REPORT_S:
            raise TransferError(f"{self._peer_id} at {self._name}: {self._last_failure}")
        num_waiting = sum(map(len, self._waiting))
        self._check_room(num_waiting, len(frame), f"at {self._name} does not answer")
        self._waiting.append(frame)
        self.progress()

    def write(self, kind: Kind, head: Head, parts: Sequence[memoryview]) -> PostedWrite:
        """Post a write of blocks, or a probe; raise TransferError if there is no connection."""
        self._check()
        if not self._was_welcome:
            raise TransferError(f"there is no connection to {self._peer_id}")
        frame = encode_frame(kind, head, sum(map(len, parts)))
        posted = PostedWrite(self)
        self._writes.append(posted)
        if self._connection is not None and self._is_welcome:
            self._connection.post(frame, *parts)
            self._connection.flush()
        else:
            self._waiting += [frame, *parts]
        return posted

    def connections(self) -> list[Connection]:
        """Return the connections to poll; `progress` then reads and writes."""
        return [c for c in (self._connection, self._ended) if c is not None]

    @property
    def round_trip_s(self) -> float:
        """Return the shortest recent round trip to the peer; 0.0: unknown."""
        try:
            return shortest_round_trip_s(self._connection.raw) if self._connection else 0.0
        except OSError:  # the connection has just failed
            return 0.0

    @property
    def dialling(self) -> socket.socket | None:
        """Return the dialled socket, to poll until it is writable; None: none is being dialled."""
        return self._raw

    @property
    def is_active(self) -> bool:
        """Return whether a write is not over, or bytes wait for the connection."""
        return bool(self._writes or self._waiting)

    def progress(self) -> None:
        """Dial if necessary; read and send as much as one turn allows, without waiting."""
        if self.problem:
            return
        if self._ended is not None:
            self._ended.progress()
            if self._ended.problem or self._clock() - self._dialled_at >= DIAL_TIMEOUT_S:
                self._ended.close("the connection was replaced to get new keys")
                self._ended = None
        if self._connection is not None:
            self._continue_connection(self._connection)
        elif self._raw is not None:
            self._await_tcp(self._raw)
        elif self._waiting and self._clock() >= self._retry_at:
            self._dial()

    def close(self) -> None:
        self._fail("the connection was closed")

    # ------------------------------------------------------------------ inside

    @property
    def _name(self) -> str:
        return f"{self._at[0]}:{self._at[1]}"

    def _check_room(self, num_queued: int, num_bytes: int, problem: str) -> None:
        """Raise an error if a message does not fit behind the queued bytes.

        Args:
            problem: the peer's fault, for the error if even a short message does not fit.
        """
        # The limit is for messages, so it does not apply while a write's blocks are queued.
        missing = 0 if self._writes else num_queued + num_bytes - MAX_QUEUED_BYTES
        if missing > 0 and num_bytes > SHORT_BYTES:
            raise QueueFullError(f"{num_queued} bytes wait for {self._peer_id}")
        if missing > MAX_SHORT_BYTES:
            raise TransferError(f"{self._peer_id} {problem}")

    def _check(self) -> None:
        if self.problem:
            raise TransferError(self.problem)

    def _dial(self) -> None:
        family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
        self._dialled_at = self._clock()
        if not self._last_failure:
            self._failing_since = self._dialled_at
        try:
            raw = socket.socket(family, socket.SOCK_STREAM)
        # No file descriptor is left; other peers' connections are not affected
        except OSError as error:
            self._retry(str(error.strerror).lower())
            return
        raw.setblocking(False)
        code = raw.connect_ex(self._at)
        if code not in (0, errno.EINPROGRESS):
            raw.close()
            self._retry(os.strerror(code).lower())
            return
        self._raw = raw

    def _await_tcp(self, raw: socket.socket) -> None:
        """Begin TLS if the dialled TCP connection is open; plan to dial again if it has failed."""
        code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raw.close()
            self._raw = None
            self._retry(os.strerror(code).lower())
            return
        try:
            raw.getpeername()
        except OSError:
            if self._clock() - self._dialled_at >= DIAL_TIMEOUT_S:
                raw.close()
                self._raw = None
                self._retry("no answer")
            return
        self._raw = None
        self._num_done = 0
        self._connection = Connection(
            raw,
            self._identity.context(is_server=False),
            is_server=False,
            reader=FrameReader(FROM_LISTENER, _no_payload),
            on_frame=self._on_frame,
            now=self._dialled_at,
        )
        self._continue_connection(self._connection)

    def _continue_connection(self, connection: Connection) -> None:
        """Read and send; say HELLO once the peer has proved its identity; note a failure."""
        was_secure = connection.is_secure
        connection.progress()
        if connection.is_secure and not was_secure and not connection.problem:
            if self._identity.shown(connection.tls) == self._shown:
                connection.post(self._hello)
                connection.progress()
            else:
                connection.close("its certificate is not the one that the router told us of")
        if not self._is_welcome and self._clock() - connection.made_at >= DIAL_TIMEOUT_S:
            connection.close("no answer")
        if connection.problem:
            self._connection = None
            self._retry(connection.problem)

    def _retry(self, failure: str) -> None:
        """Plan to dial again after a pause, because the peer may not know this node yet."""
        if self._was_welcome:
            self._fail(f"{self._peer_id} at {self._name}: {failure}")
            return
        self._last_failure = failure
        self._retry_at = self._clock() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        for connection in self.connections():
            connection.close(problem)
        if self._raw is not None:
            self._raw.close()
        self._raw = self._connection = self._ended = None
        self._writes.clear()  # `PostedWrite.is_done` of unfinished writes raises `problem`
        self._waiting.clear()

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.WELCOME:
            if self._is_welcome or not connection.is_secure:
                raise FrameError("a second WELCOME")
            self._is_welcome = self._was_welcome = True
            self._last_failure, self._back_off_s = "", FIRST_BACK_OFF_S
            connection.post(*self._waiting)
            self._waiting.clear()
            connection.flush()
            return
        done = frame.head
        assert isinstance(done, DoneHead)
        if connection is not self._connection or not 0 < done.count - self._num_done <= len(
            self._writes
        ):
            raise FrameError("a DONE of a write that was not posted")
        while self._num_done < done.count:
            self._num_done += 1
            write = self._writes.popleft()
            write.is_taken = done.is_taken or self._num_done < done.count
            write.is_over = True
        self.has_ended_write = True

    def _renew(self) -> None:
        """Replace the connection to get new keys, if it has sent enough bytes and is idle."""
        connection = self._connection
        assert connection is not None
        if connection.sent_bytes < self._renew_bytes or self._writes or connection.queued_bytes:
            return
        connection.end_sending()
        self._ended, self._connection = connection, None
        self._is_welcome = False
        self._dial()


def _no_payload(head: Head, payload_bytes: int) -> Sink:
    raise FrameError("a payload from a listener")
