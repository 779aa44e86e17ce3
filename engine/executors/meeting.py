"""Meeting: ranks started elsewhere, maybe on other machines, connect to the engine's process.

    rank 0 ── messages, life line, an extra link ──> the engine's process ──> plans
    rank 1 ── messages, life line, an extra link ──>

A rank first sends the secret key that it was started with; the engine's process checks the key
before it decodes anything else. Refuses to know: how ranks are started.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from baton.api.errors import EngineDeadError
from baton.engine_config import EngineConfig
from engine.executors.rank_process import ENCODER, Start, serve
from engine.executors.rank_watch import WAS_STOPPED, start_watch
from models.parallel.torch_group import host_store

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_HELLO = struct.Struct(f"<{_KEY_BYTES}sIB")  # key, number of the rank, kind of link
_MESSAGES, _LIFE_LINE, _BESIDE = _LINKS = range(3)
_HELLO_TIMEOUT_S = 10.0
# Maximum number of open connections that have not sent a key yet; each of them needs a thread.
_MAX_UNKNOWN = 128
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM)
_BEAT_S = 0.2
# A connection is given up after this many seconds without a message. A busy machine is never silent
# for so long. `rank_watch` reports a stopped rank earlier.
_SILENCE_S = 5.0
# TCP keep-alive probes detect a lost machine, which does not close its connections.
_USER_TIMEOUT_MS = 10_000


class Invitation(msgspec.Struct, frozen=True):
    """The addresses and the key with which a rank joins the meeting.

    Attributes:
        host: host of the engine's process.
        port: port of the engine's process.
        store_port: port of the rendezvous store through which the ranks connect to each other.
        key: secret that a rank must send.
    """

    host: str
    port: int
    store_port: int
    key: bytes

    def encode(self) -> bytes:
        """Encode the invitation as bytes, which `decode` reads."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> Invitation:
        """Decode bytes that `encode` made."""
        return _INVITATION.decode(content)


_INVITATION = msgspec.msgpack.Decoder(Invitation)


class RemoteRank:
    """The engine process's handle of a connected rank; see `engine.executors.ranks.OtherRank`."""

    def __init__(
        self, rank: int, messages: Connection, life_line: Connection, beside: Connection
    ) -> None:
        self.rank, self.messages, self.beside = rank, messages, beside
        self._life_line = life_line
        self._heard_at = time.monotonic()

    def why_gone(self) -> str | None:
        try:
            while self._life_line.poll():
                if self._life_line.recv_bytes(1) == WAS_STOPPED:
                    return f"rank {self.rank} was stopped"
                self._heard_at = time.monotonic()
        except (EOFError, OSError):
            return f"rank {self.rank} ended"
        silence_s = time.monotonic() - self._heard_at
        if silence_s > _SILENCE_S:
            return f"rank {self.rank} has said nothing for {silence_s:.1f} s"
        return None

    def end_rank(self) -> None:
        """Close the connection, which ends the rank."""
        self.messages.close()
        self._life_line.close()


class Meeting:
    """The listener of the engine's process, to which all other ranks connect.

    Args:
        host: name or address of this machine that the ranks can reach.
        ranks: numbers of the ranks to wait for.
    """

    def __init__(self, host: str, ranks: Collection[int]) -> None:
        self._ranks = ranks
        self._listener = socket.create_server(("", 0), backlog=3 * len(ranks) + _MAX_UNKNOWN)
        self._store, store_port = host_store(host)
        self.address = f"tcp://{host}:{store_port}"
        port = self._listener.getsockname()[1]
        self.invitation = Invitation(host, port, store_port, secrets.token_bytes(_KEY_BYTES))
        self._lock = threading.Lock()
        self._unknown: dict[socket.socket, None] = {}  # connections without a key, oldest first
        self._arrived: queue.Queue[tuple[int, int, socket.socket]] = queue.Queue()
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def wait(self, timeout_s: float, check: Callable[[], None]) -> list[RemoteRank]:
        """Return all ranks, in order, once all have connected, and stop listening.

        Args:
            check: raises if a rank has failed and can no longer connect; called often.

        Raises:
            EngineDeadError: some ranks have not connected in time.
        """
        deadline = time.monotonic() + timeout_s
        links: dict[tuple[int, int], socket.socket] = {}
        try:
            while len(links) < len(_LINKS) * len(self._ranks):
                check()
                if time.monotonic() > deadline:
                    here = {rank for rank, _ in links}
                    missing = ", ".join(str(rank) for rank in self._ranks if rank not in here)
                    raise EngineDeadError(f"ranks {missing} have not come within {timeout_s:g} s")
                with contextlib.suppress(queue.Empty):
                    rank, kind, link = self._arrived.get(timeout=_BEAT_S)
                    if links.setdefault((rank, kind), link) is not link:
                        link.close()  # refused: the rank already has a link of this kind
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            self._listener.close()
        return [
            RemoteRank(rank, *(Connection(links[rank, kind].detach()) for kind in _LINKS))
            for rank in sorted(self._ranks)
        ]

    def _accept(self) -> None:
        """Accept connections; if too many have not sent a key yet, close the oldest of them."""
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _TRANSIENT:  # the listener is closed: all ranks are here
                    return
                time.sleep(_BEAT_S)
                continue
            with self._lock:
                self._unknown[link] = None
                is_full = len(self._unknown) > _MAX_UNKNOWN
                if is_full:
                    oldest = next(iter(self._unknown))
                    del self._unknown[oldest]  # so that no other thread closes it again
            if is_full:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._let_in, args=(link,), daemon=True).start()

    def _let_in(self, link: socket.socket) -> None:
        try:
            link.settimeout(_HELLO_TIMEOUT_S)
            try:
                hello = link.recv(_HELLO.size, socket.MSG_WAITALL)
            finally:
                with self._lock:
                    self._unknown.pop(link, None)
            key, rank, kind = _HELLO.unpack(hello)
            if not hmac.compare_digest(key, self.invitation.key) or rank not in self._ranks:
                raise ValueError("a wrong key")
            if kind not in _LINKS:
                raise ValueError("no such link")
        except (OSError, ValueError, struct.error) as error:
            logger.warning("refused a connection to the ranks' port: %s", error)
            link.close()
            return
        _set_up(link)
        self._arrived.put((rank, kind, link))


def start_all(
    ranks: Collection[RemoteRank], meeting: Meeting, model_folder: Path, config: EngineConfig
) -> None:
    """Send the first message to each rank: its number and its options."""
    level = logging.getLogger().getEffectiveLevel()
    for rank in ranks:
        start = Start(str(model_folder), config, rank.rank, meeting.address, level)
        rank.messages.send_bytes(ENCODER.encode(start))


def attend(invitation: Invitation, rank: int, model_folder: Path | None = None) -> None:
    """Join a meeting, and serve as a rank in this process until the engine's process is gone.

    Args:
        model_folder: path of the model on this machine; None: the engine process's path.
    """
    messages, life_line, beside = (_come(invitation, rank, kind) for kind in _LINKS)
    start_watch(life_line.fileno())
    serve(messages, beside, functools.partial(_live, life_line), model_folder)


def _come(invitation: Invitation, rank: int, kind: int) -> Connection:
    link = socket.create_connection((invitation.host, invitation.port), _HELLO_TIMEOUT_S)
    link.sendall(_HELLO.pack(invitation.key, rank, kind))
    _set_up(link)
    return Connection(link.detach())


def _live(life_line: Connection) -> None:
    """Send keep-alive messages until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            life_line.send_bytes(b".")
            if life_line.poll(_BEAT_S):
                life_line.recv_bytes(1)


def _set_up(link: socket.socket) -> None:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
