"""A table of hostile HTTP/2 tricks, each an endless run of frames.

Tests use the table against one server, `benchmarks/security/http2_tricks.py` against a whole
deployment.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fakes.network.raw_http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_frames,
    frame,
)

PRIORITY, CONTINUATION, UNKNOWN = 2, 9, 0xBE
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/baton.v1.Inference/Generate"
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_FRAME_BYTES = 2**14
_MANY_SETTINGS = struct.pack(">HI", 4, 9) * 2730
_NEWEST = b"\xbe"  # the newest entry of the dynamic table


@dataclass(frozen=True)
class Trick:
    """One way to attack a server.

    Attributes:
        frames: yields what a client sends after its preface and its settings.
        reads: whether the client reads what the server sends.
        window: initial window that each stream gives the server, in bytes.
        is_refused: whether the server closes the connection; else it slows the client down.
        is_bulk: whether the frames are few and long, so that the server takes them unslowed.
    """

    name: str
    frames: Callable[[], Iterator[bytes]]
    reads: bool = True
    window: int = 2**16 - 1
    is_refused: bool = False
    is_bulk: bool = False


def block(path: str = CHECK, more: bytes = b"") -> bytes:
    """Return the header block of a call, with more fields after its own."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields) + more


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an HPACK integer with a prefix of this many bits."""
    most = 2**bits - 1
    if value < most:
        return bytes([first | value])
    coded, value = bytearray([first | most]), value - most
    while value >= 128:
        coded.append(value % 128 | 128)
        value //= 128
    coded.append(value)
    return bytes(coded)


def literal(name: bytes, value: bytes, *, insert: bool = False) -> bytes:
    """Encode a literal header field; with ``insert`` the decoder remembers it."""
    kind = b"\x40" if insert else b"\0"
    return kind + integer(len(name), 7) + name + integer(len(value), 7) + value


def streams() -> Iterator[int]:
    """Yield the ids of a client's streams."""
    return itertools.count(1, 2)


def headers(stream: int, data: bytes, *, end_stream: bool = False) -> bytes:
    """Return a header block in as many frames as it needs."""
    parts = [data[at : at + _FRAME_BYTES] for at in range(0, len(data), _FRAME_BYTES)] or [b""]
    frames = []
    for number, part in enumerate(parts):
        flags = END_HEADERS * (number == len(parts) - 1)
        if not number:
            flags |= END_STREAM * end_stream
        frames.append(frame(CONTINUATION if number else HEADERS, flags, stream, part))
    return b"".join(frames)


# ---------------------------------------------------------------- headers


def long_blocks() -> Iterator[bytes]:
    """Yield header blocks of 4 MiB, with values of 16 KiB."""
    field = literal(b"x-long", b"v" * 2**14)
    for stream in streams():
        yield headers(stream, block(more=field * 256))


def many_fields() -> Iterator[bytes]:
    """Yield header blocks of 14,000 short fields."""
    for stream in streams():
        yield headers(stream, block(more=literal(b"a", b"b") * 14_000))


def bombs(num_copies: int) -> Iterator[bytes]:
    """Yield blocks of few bytes that name one long header many times."""
    yield headers(1, block(more=literal(b"k", b"v" * 3900, insert=True)))
    for stream in itertools.count(3, 2):
        yield headers(stream, block(more=_NEWEST * num_copies))


def name_bombs() -> Iterator[bytes]:
    """Yield blocks whose fields have a long name from the table."""
    yield headers(1, block(more=literal(b"n" * 3900, b"", insert=True)))
    named = integer(62, 4) + b"\0"
    for stream in itertools.count(3, 2):
        yield headers(stream, block(more=named * 3000))


def continuations(payload: bytes) -> Iterator[bytes]:
    """Yield one header block that never ends."""
    yield frame(HEADERS, 0, 1, block())
    while True:
        yield frame(CONTINUATION, 0, 1, payload) * 500


def other_frames_amid() -> Iterator[bytes]:
    """Yield frames of other kinds between the parts of a header block."""
    yield frame(HEADERS, 0, 1, block())
    while True:
        yield frame(PING, 0, 0, bytes(8)) * 500


def stray_continuations() -> Iterator[bytes]:
    """Yield CONTINUATION frames without a header block."""
    while True:
        yield frame(CONTINUATION, END_HEADERS, 1, b"")


def bad_indices() -> Iterator[bytes]:
    """Yield fields whose index is not in the table."""
    for stream in streams():
        yield headers(stream, block(more=integer(10_000, 7, 0x80)))


# ---------------------------------------------------------------- calls


def held_calls() -> Iterator[bytes]:
    """Yield calls with the most headers allowed, whose message never comes."""
    yield headers(1, block(GENERATE, literal(b"k", b"v" * 3900, insert=True)))
    for stream in itertools.count(3, 2):
        yield headers(stream, block(GENERATE, _NEWEST * 7))


def resets() -> Iterator[bytes]:
    """Yield calls that are reset as soon as they have begun."""
    for stream in streams():
        yield headers(stream, block()) + frame(RST_STREAM, 0, stream, bytes([0, 0, 0, 8]))


def resets_of_nothing() -> Iterator[bytes]:
    """Yield resets of one stream that has ended."""
    yield call_frames(1, CHECK, b"")
    while True:
        yield frame(RST_STREAM, 0, 1, bytes(4)) * 500


def whole_calls(path: str) -> Iterator[bytes]:
    """Yield calls, as fast as they can be sent."""
    for stream in streams():
        yield call_frames(stream, path, b"")


# ---------------------------------------------------------------- control frames, and windows


def flood(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> Iterator[bytes]:
    """Yield the same frame for ever."""
    while True:
        yield frame(kind, flags, stream, payload) * 500


def window_swings() -> Iterator[bytes]:
    """Yield settings that open and close the windows of many open streams."""
    for stream in range(1, 400, 2):
        yield call_frames(stream, WATCH, b"")
    wide, none = (struct.pack(">HI", 4, size) for size in (2**20, 0))
    while True:
        yield (frame(SETTINGS, payload=wide) + frame(SETTINGS, payload=none)) * 250


def window_updates(step: int) -> Iterator[bytes]:
    """Yield updates that raise the windows of a stream and the connection beyond the limit."""
    yield call_frames(1, WATCH, b"")
    update = struct.pack(">I", step)
    while True:
        yield (frame(WINDOW_UPDATE, 0, 1, update) + frame(WINDOW_UPDATE, 0, 0, update)) * 250


def small_data(payload: bytes) -> Iterator[bytes]:
    """Yield a message cut into as many frames as possible."""
    yield headers(1, block(GENERATE))
    while True:
        yield frame(DATA, 0, 1, payload) * 500


def data_behind_end() -> Iterator[bytes]:
    """Yield messages on a stream that has ended."""
    yield call_frames(1, CHECK, b"")
    while True:
        yield frame(DATA, 0, 1, bytes(_FRAME_BYTES))


TRICKS = (
    Trick("header blocks of 4 MiB", long_blocks, is_refused=True),
    Trick("blocks of 14,000 fields", many_fields, is_refused=True),
    Trick("HPACK bombs", lambda: bombs(3000), is_refused=True),
    Trick("HPACK bombs of long names", name_bombs, is_refused=True),
    Trick("CONTINUATION without end", lambda: continuations(b""), is_refused=True),
    Trick("CONTINUATION of a byte", lambda: continuations(b"\x82"), is_refused=True),
    Trick("CONTINUATION of 16 KiB", lambda: continuations(b"\x82" * _FRAME_BYTES), is_refused=True),
    Trick("CONTINUATION behind nothing", stray_continuations, is_refused=True),
    Trick("PING amid a header block", other_frames_amid, is_refused=True),
    Trick("indices that are not there", bad_indices, is_refused=True),
    Trick("SETTINGS of 16 KiB", lambda: flood(SETTINGS, _MANY_SETTINGS), is_refused=True),
    Trick("PUSH_PROMISE", lambda: flood(5, bytes(8), END_HEADERS, 1), is_refused=True),
    Trick("calls held with many headers", held_calls),
    Trick("calls that are reset", resets),
    Trick("RST_STREAM", resets_of_nothing),
    Trick("health checks", lambda: whole_calls(CHECK)),
    Trick("health checks, unread", lambda: whole_calls(CHECK), reads=False),
    Trick("health watches without a window", lambda: whole_calls(WATCH), window=0),
    Trick("calls that do not exist", lambda: whole_calls("/no/call")),
    Trick("SETTINGS", lambda: flood(SETTINGS, b"")),
    Trick("SETTINGS, unread", lambda: flood(SETTINGS, b""), reads=False),
    Trick("SETTINGS that swing windows", window_swings),
    Trick("PING", lambda: flood(PING, bytes(8))),
    Trick("PING, unread", lambda: flood(PING, bytes(8)), reads=False),
    Trick("PING answers", lambda: flood(PING, bytes(8), ACK)),
    Trick("WINDOW_UPDATE by 1", lambda: window_updates(1)),
    Trick("WINDOW_UPDATE by 2^31 - 1", lambda: window_updates(2**31 - 1)),
    Trick("WINDOW_UPDATE by 0", lambda: window_updates(0)),
    Trick("PRIORITY", lambda: flood(PRIORITY, bytes(5), 0, 3)),
    Trick("unknown frames", lambda: flood(UNKNOWN, bytes(8))),
    Trick("GOAWAY", lambda: flood(GOAWAY, bytes(8))),
    Trick("DATA of nothing", lambda: small_data(b"")),
    Trick("DATA of a byte", lambda: small_data(b"\0")),
    Trick("DATA of 16 bytes", lambda: small_data(bytes(16)), is_bulk=True),
    Trick("DATA before its stream", lambda: flood(DATA, bytes(100), 0, 99), is_refused=True),
    Trick("DATA behind its stream", data_behind_end, is_bulk=True),
)  # fmt: skip
