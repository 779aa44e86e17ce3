"""What a hostile client can send over HTTP/2: a table of tricks, each an endless run of frames.

Tests use the table against one server, `benchmarks/http2_tricks.py` against a whole deployment.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fakes.raw_http2 import (
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
_NEWEST = b"\xbe"  # the entry of the dynamic table that was inserted last


@dataclass(frozen=True)
class Trick:
    """One way to attack.

    Attributes:
        frames: makes what a client sends behind its preface and its settings.
        reads: the client takes what the server sends.
        window: that each of its streams gives the server at the beginning.
        is_refused: the server closes the connection; else it slows the client down.
        is_bulk: few long frames, which the server takes as fast as they come.
    """

    name: str
    frames: Callable[[], Iterator[bytes]]
    reads: bool = True
    window: int = 2**16 - 1
    is_refused: bool = False
    is_bulk: bool = False


def block(path: str = CHECK, more: bytes = b"") -> bytes:
    """A header block of a call, with more fields behind its own."""
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields) + more


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """An integer of HPACK with a prefix of so many bits."""
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
    """A header field as it is; the decoder remembers it if it is to be inserted."""
    kind = b"\x40" if insert else b"\0"
    return kind + integer(len(name), 7) + name + integer(len(value), 7) + value


def streams() -> Iterator[int]:
    """Numbers of a client's streams."""
    return itertools.count(1, 2)


def headers(stream: int, data: bytes, *, end_stream: bool = False) -> bytes:
    """A header block in as many frames as it needs."""
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
    """Header blocks of 4 MiB, of values of 16 KiB."""
    field = literal(b"x-long", b"v" * 2**14)
    for stream in streams():
        yield headers(stream, block(more=field * 256))


def many_fields() -> Iterator[bytes]:
    """Header blocks of 14,000 short fields."""
    for stream in streams():
        yield headers(stream, block(more=literal(b"a", b"b") * 14_000))


def bombs(num_copies: int) -> Iterator[bytes]:
    """Blocks of few bytes that name one long header many times."""
    yield headers(1, block(more=literal(b"k", b"v" * 3900, insert=True)))
    for stream in itertools.count(3, 2):
        yield headers(stream, block(more=_NEWEST * num_copies))


def name_bombs() -> Iterator[bytes]:
    """Blocks whose fields have a long name that stands in the table."""
    yield headers(1, block(more=literal(b"n" * 3900, b"", insert=True)))
    named = integer(62, 4) + b"\0"
    for stream in itertools.count(3, 2):
        yield headers(stream, block(more=named * 3000))


def continuations(payload: bytes) -> Iterator[bytes]:
    """One header block that never ends."""
    yield frame(HEADERS, 0, 1, block())
    while True:
        yield frame(CONTINUATION, 0, 1, payload) * 500


def other_frames_amid() -> Iterator[bytes]:
    """Frames of other kinds between the parts of a header block."""
    yield frame(HEADERS, 0, 1, block())
    while True:
        yield frame(PING, 0, 0, bytes(8)) * 500


def stray_continuations() -> Iterator[bytes]:
    """CONTINUATION frames behind nothing."""
    while True:
        yield frame(CONTINUATION, END_HEADERS, 1, b"")


def bad_indices() -> Iterator[bytes]:
    """Fields that the table does not have."""
    for stream in streams():
        yield headers(stream, block(more=integer(10_000, 7, 0x80)))


# ---------------------------------------------------------------- calls


def held_calls() -> Iterator[bytes]:
    """Calls with as many headers as may be, whose message never comes."""
    yield headers(1, block(GENERATE, literal(b"k", b"v" * 3900, insert=True)))
    for stream in itertools.count(3, 2):
        yield headers(stream, block(GENERATE, _NEWEST * 7))


def resets() -> Iterator[bytes]:
    """Calls that are reset as soon as they have begun."""
    for stream in streams():
        yield headers(stream, block()) + frame(RST_STREAM, 0, stream, bytes([0, 0, 0, 8]))


def resets_of_nothing() -> Iterator[bytes]:
    """Resets of one stream that has ended."""
    yield call_frames(1, CHECK, b"")
    while True:
        yield frame(RST_STREAM, 0, 1, bytes(4)) * 500


def whole_calls(path: str) -> Iterator[bytes]:
    """Calls, as fast as they can be sent."""
    for stream in streams():
        yield call_frames(stream, path, b"")


# ---------------------------------------------------------------- control frames, and windows


def flood(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> Iterator[bytes]:
    """One frame, for ever."""
    while True:
        yield frame(kind, flags, stream, payload) * 500


def window_swings() -> Iterator[bytes]:
    """Settings that open and close the windows of many open streams."""
    for stream in range(1, 400, 2):
        yield call_frames(stream, WATCH, b"")
    wide, none = (struct.pack(">HI", 4, size) for size in (2**20, 0))
    while True:
        yield (frame(SETTINGS, payload=wide) + frame(SETTINGS, payload=none)) * 250


def window_updates(step: int) -> Iterator[bytes]:
    """Updates of a stream's window and the connection's, beyond what they may be."""
    yield call_frames(1, WATCH, b"")
    update = struct.pack(">I", step)
    while True:
        yield (frame(WINDOW_UPDATE, 0, 1, update) + frame(WINDOW_UPDATE, 0, 0, update)) * 250


def small_data(payload: bytes) -> Iterator[bytes]:
    """A message that comes in as many frames as it can."""
    yield headers(1, block(GENERATE))
    while True:
        yield frame(DATA, 0, 1, payload) * 500


def data_behind_end() -> Iterator[bytes]:
    """Messages on a stream that has ended."""
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
