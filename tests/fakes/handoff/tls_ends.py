"""Two TLS transports, each with a test for its I/O thread."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from kvconnector.peer_info import PeerInfo, RankMemory
from kvconnector.transports.base import CertificateFiles, PendingWrite, TransportOptions
from kvconnector.transports.sockets.transport import TlsTransport, _Where
from tests.fakes.handoff.kv_memories import memory_of
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.waiting import wait_until

SHAPE = (8, 2, 2, 4, 8)  # blocks, layers, k and v, heads and tokens, head_dim
GRANTED = ("a", 1)
numbers = count()


class End:
    """A transport whose I/O thread is the test."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] = SHAPE,
        listen: str = "127.0.0.1:0",
        tls: CertificateFiles | None = None,
    ) -> None:
        self.blocks = torch.rand(shape) if name == "p" else torch.zeros(shape)
        self.clock = VirtualClock()
        options = TransportOptions(listen=listen, tls=tls)
        engine_id = f"{name}{next(numbers)}"
        self.transport = TlsTransport(engine_id, memory_of(self.blocks), options, self.clock)
        self.heard: list[bytes] = []
        self.heard_of: set[str] = set()

    @property
    def info(self) -> PeerInfo:
        return self.transport.peer_info

    @property
    def id(self) -> str:
        return self.info.engine_id

    def round(self) -> None:
        taken = self.transport.take_notifications()
        self.heard += [payload for _, payload in taken]
        self.heard_of |= {engine_id for engine_id, _ in taken}


def rounds_until(ends: tuple[End, ...], condition: Callable[[], object], what: str) -> None:
    def look() -> object:
        for end in ends:
            end.round()
        return condition()

    wait_until(look, what)


def meet(p: End, d: End) -> None:
    p.transport.notify(d.id, b"hello")
    rounds_until((p, d), lambda: b"hello" in d.heard, "the first message")
    d.heard.clear()


def done(p: End, d: End, write: PendingWrite) -> None:
    rounds_until((p, d), write.is_done, "the write")


def with_where(info: PeerInfo, where: _Where) -> PeerInfo:
    return msgspec.structs.replace(
        info, ranks=(RankMemory(agent_metadata=msgspec.msgpack.encode(where)),)
    )


def where_of(info: PeerInfo) -> _Where:
    return msgspec.msgpack.decode(info.ranks[0].agent_metadata, type=_Where)


def reason(p: End, d: End) -> str:
    """Wait until the connection fails; return the reason."""
    for _ in range(2000):
        try:
            p.transport.notify(d.id, b"x")
        except TransferError as error:
            return str(error)
        p.round()
        d.round()
        p.clock.advance(0.01)
    pytest.fail("no reason is given")
