"""Incoming: the connections that peers dialled. Connections of unknown diallers cost little.

    accepted -> secure -> HELLO accepted -> messages and blocks of this peer

HELLO is accepted if it names an engine id, and the dialler shows the certificate in this engine
id's peer info. From then on, every frame on the connection counts as sent by this peer.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.errors import ConfigError
from kvconnector.transports.sockets.connection import Connection
from kvconnector.transports.sockets.frames import (
    FROM_DIALLER,
    MAX_HEAD_BYTES,
    MAX_HELLO_BYTES,
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

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 3.0
# Maximum number of connections whose HELLO is not accepted yet; a new one replaces the oldest
MAX_STRANGERS = 32
MAX_ACCEPTS = 8  # maximum number of connections that are accepted per round
# Maximum number of connections per peer. It is more than one because a peer that dials again may
# not have closed its older connection.
MAX_PER_PEER = 4
# A connection is closed if more bytes are queued for a peer that does not read
MAX_QUEUED_BYTES = 2**20
_LOG_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Incoming:
    """One incoming connection; ``peer_id`` is empty until its HELLO is accepted."""

    connection: Connection
    peer_id: str = ""
    num_writes: int = 0
    num_told: int = 0


class Incoming:
    """All incoming connections, and the listening socket.

    Args:
        own_id: engine id of this process.
        at: host and port to listen on; port 0: any free port.
        identity: this node's identity.
        shown_by: returns the identity that the peer with this engine id must prove; None: the
            engine id is unknown.
        open_sink: returns the destination of a payload from a peer.
        on_message: called with each message and the engine id of its sender.
        clock: returns monotonic seconds.

    Attributes:
        is_ready: set by the owner if a new connection waits to be accepted.

    Raises:
        ConfigError: the node cannot listen on the address.
    """

    def __init__(
        self,
        own_id: str,
        at: tuple[str, int],
        identity: Identity,
        *,
        shown_by: Callable[[str], bytes | None],
        open_sink: Callable[[str, Head, int], Sink],
        on_message: Callable[[str, bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._own_id = own_id
        self._identity = identity
        self._shown_by = shown_by
        self._open_sink = open_sink
        self._on_message = on_message
        self._clock = clock
        self._incoming: list[_Incoming] = []  # oldest first
        self._log_at = clock()
        self._num_not_logged = 0
        self.is_ready = False
        try:
            family, _, _, _, address = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0]
            self.listener = socket.create_server(address[:2], family=family, backlog=64)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"kv_listen: cannot listen at {at[0]}:{at[1]}: {error}") from error
        self.listener.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the listening socket."""
        host, port = self.listener.getsockname()[:2]
        return str(host), int(port)

    def connections(self) -> list[Connection]:
        """Return the connections to poll; `progress` then reads and writes."""
        return [incoming.connection for incoming in self._incoming]

    def progress(self) -> None:
        """Accept connections; read and send as much as one turn allows, without waiting."""
        if self.is_ready:
            self.is_ready = False
            self._accept()
        for incoming in self._incoming:
            incoming.connection.progress()
            self._tell(incoming)
            self._check(incoming)
        self._incoming = [i for i in self._incoming if not i.connection.problem]

    def close(self) -> None:
        self.listener.close()
        for incoming in self._incoming:
            incoming.connection.close("closing")

    # ------------------------------------------------------------------ inside

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                raw, _ = self.listener.accept()
            # No connection waits, its dialler has closed it, or no file descriptor is left
            except OSError:
                return
            raw.setblocking(False)
            strangers = [i for i in self._incoming if not i.peer_id]
            if len(strangers) >= MAX_STRANGERS:
                strangers[0].connection.close("too many connections")
                self._incoming.remove(strangers[0])
            self._add(raw)

    def _add(self, raw: socket.socket) -> None:
        def open_sink(head: Head, payload_bytes: int) -> Sink:
            if not incoming.peer_id:
                raise FrameError("a payload before HELLO")
            return self._open_sink(incoming.peer_id, head, payload_bytes)

        connection = Connection(
            raw,
            self._identity.context(is_server=True),
            is_server=True,
            reader=FrameReader(FROM_DIALLER, open_sink, MAX_HELLO_BYTES),
            on_frame=lambda _, frame: self._on_frame(incoming, frame),
            now=self._clock(),
        )
        incoming = _Incoming(connection)
        self._incoming.append(incoming)

    def _on_frame(self, incoming: _Incoming, frame: Frame) -> None:
        if frame.kind is Kind.HELLO:
            assert isinstance(frame.head, HelloHead)
            self._accept_hello(incoming, frame.head)
        elif not incoming.peer_id:
            raise FrameError(f"a {frame.kind.name} before HELLO")
        elif frame.kind is Kind.MESSAGE:
            assert isinstance(frame.head, bytes)
            self._on_message(incoming.peer_id, frame.head)
        else:
            incoming.num_writes += 1
            if not frame.is_taken:
                self._tell(incoming, is_taken=False)

    def _accept_hello(self, incoming: _Incoming, hello: HelloHead) -> None:
        """Accept a dialler's HELLO; raise FrameError unless it proves the named peer's identity."""
        if incoming.peer_id:
            raise FrameError("a second HELLO")
        # The dialler wants to reach an earlier process at this address
        if hello.peer_id != self._own_id:
            raise FrameError("it wants to reach another engine id than this node's")
        shown = self._shown_by(hello.engine_id)
        if shown is None:
            raise FrameError("its peer info has not come from a router yet")
        if self._identity.shown(incoming.connection.tls) != shown:
            raise FrameError(f"it is not {hello.engine_id}: its certificate is another's")
        same = [i for i in self._incoming if i.peer_id == hello.engine_id]
        if len(same) >= MAX_PER_PEER:
            same[0].connection.close("too many connections of one peer")
        incoming.peer_id = hello.engine_id
        incoming.connection.reader.max_head_bytes = MAX_HEAD_BYTES
        incoming.connection.post(encode_frame(Kind.WELCOME))
        incoming.connection.flush()

    def _tell(self, incoming: _Incoming, *, is_taken: bool = True) -> None:
        """Send DONE to the peer if the number of writes that are over has changed."""
        if incoming.num_told < incoming.num_writes and not incoming.connection.problem:
            incoming.num_told = incoming.num_writes
            done = DoneHead(incoming.num_writes, is_taken)
            incoming.connection.post(encode_frame(Kind.DONE, done))
            incoming.connection.flush()

    def _check(self, incoming: _Incoming) -> None:
        """Close a connection that must not continue; log why a connection has ended."""
        connection = incoming.connection
        if not incoming.peer_id and self._clock() - connection.made_at >= HELLO_TIMEOUT_S:
            connection.close(f"it sent no accepted HELLO within {HELLO_TIMEOUT_S:g} s")
        elif incoming.peer_id and self._shown_by(incoming.peer_id) is None:
            connection.close(f"{incoming.peer_id} is gone")
        elif connection.queued_bytes > MAX_QUEUED_BYTES:
            connection.close("it reads nothing")
        if connection.problem:
            self._log(incoming)

    def _log(self, incoming: _Incoming) -> None:
        """Log why a connection has ended. Unknown diallers cause at most one line per second."""
        connection = incoming.connection
        if incoming.peer_id:
            logger.info("KV connection of %s ended: %s", incoming.peer_id, connection.problem)
            return
        now = self._clock()
        if now < self._log_at:
            self._num_not_logged += 1
            return
        others = f" (and {self._num_not_logged} others)" if self._num_not_logged else ""
        self._log_at, self._num_not_logged = now + _LOG_INTERVAL_S, 0
        logger.warning(
            "refused a KV connection from %s%s: %s", connection.address, others, connection.problem
        )
