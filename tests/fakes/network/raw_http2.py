"""An HTTP/2 client of a few frames, for calls that no well-behaved gRPC client would make.

Answers pings and settings, as a living peer does, and gives no window unless it is told to.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_FRAME_BYTES = 16_384


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_frames(
    stream: int,
    path: str,
    message: bytes,
    *,
    headers: Sequence[tuple[str, str]] = (),
    compressed: bool = False,
) -> bytes:
    """Return the frames of a whole gRPC call with one message."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"), *headers,
    ]  # fmt: skip
    block = b"".join(header_field(name.encode(), value.encode()) for name, value in fields)
    body = struct.pack(">BI", compressed, len(message)) + message
    parts = [body[at : at + _MAX_FRAME_BYTES] for at in range(0, len(body), _MAX_FRAME_BYTES)]
    frames = [frame(DATA, _END_STREAM * (part is parts[-1]), stream, part) for part in parts]
    return b"".join([frame(HEADERS, _END_HEADERS, stream, block), *frames])


def header_field(name: bytes, value: bytes) -> bytes:
    """Encode a header that is neither indexed nor compressed."""
    assert max(len(name), len(value)) < 127
    return b"".join([b"\0", bytes([len(name)]), name, bytes([len(value)]), value])


@dataclass
class RawHttp2:
    """A raw HTTP/2 connection.

    Attributes:
        num_data_bytes: received bytes of data, by stream.
        ended: streams that the server has ended or reset.
        trailers: trailers of the last stream that the server ended.
        num_answered: our PING and SETTINGS frames that the server answered.
        num_settings: SETTINGS frames that came, and were answered.
        is_closed: set once the server has closed the connection.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_data_bytes: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    trailers: bytes = b""
    num_answered: int = 0
    num_settings: int = 0
    is_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        window: int = 2**16 - 1,
        tls: ssl.SSLContext | None = None,
        source: str | None = None,
    ) -> RawHttp2:
        """Connect to a server.

        Args:
            window: initial window of a stream, in bytes.
            source: the client's own IP address; None: whichever leads to the server.
        """
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=tls, local_addr=(source, 0) if source else None
        )
        initial_window_size = struct.pack(">HI", 4, window)
        writer.write(PREFACE + frame(SETTINGS, payload=initial_window_size))
        self = cls(reader, writer)
        self._task = asyncio.create_task(self._read())
        return self

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def open_window(self, stream: int, num_bytes: int) -> None:
        """Let the server send this many more bytes on the stream and on the connection."""
        for number in (stream, 0):
            self.send(frame(WINDOW_UPDATE, 0, number, struct.pack(">I", num_bytes)))

    async def close(self) -> None:
        self.writer.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                stream = int.from_bytes(head[5:], "big")
                self._take(kind, flags, stream, await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & _ACK:
            self.send(frame(kind, _ACK, 0, payload if kind == PING else b""))
            self.num_settings += kind == SETTINGS
        elif kind in (SETTINGS, PING):
            self.num_answered += 1
        elif kind == DATA:
            self.num_data_bytes[stream] = self.num_data_bytes.get(stream, 0) + len(payload)
        elif kind == HEADERS and flags & _END_STREAM:  # else they begin another stream's answer
            self.trailers = payload
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & _END_STREAM):
            self.ended.add(stream)
