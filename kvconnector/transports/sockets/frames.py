"""Frames: the wire format of a KV connection over TLS. Refuses to know: sockets, memory.

    kind (1) | bytes of head (4) | bytes of payload (8) | head | payload          big-endian

    dialler -> listener   HELLO    names the dialler; sent first and once
                          MESSAGE  a message of the protocol (`protocol/messages.py`), as head
                          WRITE    blocks for a transfer, their bytes as payload
                          PROBE    a self-test's bytes for a slot of the scratch memory
    listener -> dialler   WELCOME  HELLO is accepted
                          DONE     how many writes and probes are over; whether the last was kept

The sending node dials, so two nodes have up to two connections. Any other bytes raise FrameError
and end the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Protocol

import msgspec

from baton.api.errors import TransferError
from kvconnector.blocks import LayerRange

HEADER = struct.Struct(">BIQ")
# Maximum number of bytes of a head; enough for a Grant of as many blocks as `BlockIds` allows
MAX_HEAD_BYTES = 6 * 2**20
MAX_HELLO_BYTES = 2**10  # maximum number of bytes of a head before HELLO is accepted
# Maximum number of bytes of a payload; any write is smaller (`Portions.write_bytes`, or one block)
MAX_PAYLOAD_BYTES = 2**28

_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class FrameError(TransferError):
    """Raised for bytes that no peer of this version sends."""


class Kind(IntEnum):
    """The kinds of frames; the module's docstring explains them."""

    HELLO = 1
    MESSAGE = 2
    WRITE = 3
    PROBE = 4
    WELCOME = 5
    DONE = 6


FROM_DIALLER = frozenset({Kind.HELLO, Kind.MESSAGE, Kind.WRITE, Kind.PROBE})
FROM_LISTENER = frozenset({Kind.WELCOME, Kind.DONE})
WITH_PAYLOAD = frozenset({Kind.WRITE, Kind.PROBE})


class HelloHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of HELLO: the dialler's engine id, and the engine id that it wants to reach."""

    engine_id: str
    peer_id: str


class WriteHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of WRITE: the transfer, and the listener's blocks in the order of their bytes."""

    request_id: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    block_ids: list[_Index]
    layers: LayerRange | None = None


class ProbeHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of PROBE: a slot of the listener's scratch memory."""

    slot: _Index


class DoneHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of DONE: how many writes and probes on this connection are over.

    Attributes:
        is_taken: whether the listener kept the bytes of the last write or probe. The listener has
            kept the bytes of all others since the previous DONE.
    """

    count: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    is_taken: bool


Head = HelloHead | WriteHead | ProbeHead | DoneHead

_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Head]] = {
    kind: msgspec.msgpack.Decoder(head_type)
    for kind, head_type in {
        Kind.HELLO: HelloHead,
        Kind.WRITE: WriteHead,
        Kind.PROBE: ProbeHead,
        Kind.DONE: DoneHead,
    }.items()
}
_encoder = msgspec.msgpack.Encoder()


class Sink(Protocol):
    """The destination of a frame's payload."""

    def buffer(self) -> memoryview:
        """Return the memory for the payload's next bytes; not empty until all have arrived."""

    def advance(self, num_bytes: int) -> None:
        """Record that the caller has written ``num_bytes`` bytes to the start of `buffer`."""

    def finish_payload(self) -> bool:
        """Finish a payload after its last byte; return whether its bytes were kept."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A complete frame.

    Attributes:
        head: the decoded head, or the bytes of a message.
        is_taken: whether the payload's bytes were kept; true for a frame without a payload.
    """

    kind: Kind
    head: Head | bytes
    is_taken: bool = True


def encode_frame(kind: Kind, head: Head | bytes = b"", payload_bytes: int = 0) -> bytes:
    """Encode a frame's header and head; the payload's bytes are sent separately."""
    encoded = head if isinstance(head, bytes) else _encoder.encode(head)
    return HEADER.pack(kind, len(encoded), payload_bytes) + encoded


class FrameReader:
    """Assembles frames from pieces of any size; payloads are read directly into sinks.

    Args:
        kinds: kinds of frames that the other end may send.
        open_sink: returns the destination of a payload, by the frame's head and the payload's size;
            may raise FrameError.

    Attributes:
        max_head_bytes: maximum number of bytes of an accepted head.
    """

    def __init__(
        self,
        kinds: Collection[Kind],
        open_sink: Callable[[Head, int], Sink],
        max_head_bytes: int = MAX_HEAD_BYTES,
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self._kinds = kinds
        self._open_sink = open_sink
        self._header = memoryview(bytearray(HEADER.size))
        self._begin()

    def _begin(self) -> None:
        self._part = self._header  # the memory to fill next
        self._num_filled = 0
        self._kind: Kind | None = None
        self._payload_bytes = 0
        self._sink: Sink | None = None
        self._head: Head | bytes = b""

    @property
    def is_amid(self) -> bool:
        """Return whether a frame has begun but is not complete."""
        return self._kind is not None or self._num_filled > 0

    def buffer(self) -> memoryview:
        """Return the memory to which the next received bytes must be written; never empty."""
        if self._sink is not None:
            return self._sink.buffer()
        return self._part[self._num_filled :]

    def advance(self, num_bytes: int) -> Frame | None:
        """Record that the caller has written ``num_bytes`` bytes to the start of `buffer`.

        Return a frame once it is complete.

        Raises FrameError.
        """
        if self._sink is not None:
            self._sink.advance(num_bytes)
            self._payload_bytes -= num_bytes
            return self._end(self._sink.finish_payload()) if self._payload_bytes == 0 else None
        self._num_filled += num_bytes
        if self._num_filled < len(self._part):
            return None
        if self._kind is None:
            head_bytes = self._take_header()
            if head_bytes > 0:
                self._part, self._num_filled = memoryview(bytearray(head_bytes)), 0
                return None
            return self._take_head(b"")
        return self._take_head(bytes(self._part))

    def _take_header(self) -> int:
        kind, head_bytes, payload_bytes = HEADER.unpack(self._header)
        if kind not in self._kinds:
            raise FrameError(f"a frame of unexpected kind {kind}")
        if head_bytes > self.max_head_bytes:
            raise FrameError(f"a head of {head_bytes} bytes, more than {self.max_head_bytes}")
        has_payload = kind in WITH_PAYLOAD
        if payload_bytes > MAX_PAYLOAD_BYTES or has_payload != (payload_bytes > 0):
            raise FrameError(f"an unexpected payload of {payload_bytes} bytes")
        self._kind, self._payload_bytes = Kind(kind), payload_bytes
        return int(head_bytes)

    def _take_head(self, encoded: bytes) -> Frame | None:
        assert self._kind is not None
        self._head = _decode_head(self._kind, encoded)
        if self._payload_bytes == 0:
            return self._end(True)
        assert not isinstance(self._head, bytes)
        self._sink = self._open_sink(self._head, self._payload_bytes)
        return None

    def _end(self, is_taken: bool) -> Frame:
        assert self._kind is not None
        frame = Frame(self._kind, self._head, is_taken)
        self._begin()
        return frame


def _decode_head(kind: Kind, encoded: bytes) -> Head | bytes:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return encoded
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a head of a {kind.name} that cannot be read: {error}") from error


def cut_parts(parts: Sequence[memoryview | bytes], max_bytes: int) -> list[memoryview | bytes]:
    """Divide bytes into pieces of at most ``max_bytes``: cut long parts, and join short parts.

    One call encrypts one piece. Joined parts share TLS records, so fewer records are sent.
    """
    pieces: list[memoryview | bytes] = []
    small: list[memoryview | bytes] = []
    num_small = 0
    for part in filter(len, parts):
        if len(part) >= max_bytes // 4 or num_small + len(part) > max_bytes:
            if small:
                pieces.append(b"".join(small))
            small, num_small = [], 0
        if len(part) >= max_bytes // 4:
            view = memoryview(part)
            pieces += [view[i : i + max_bytes] for i in range(0, len(view), max_bytes)]
        else:
            small.append(part)
            num_small += len(part)
    if small:
        pieces.append(b"".join(small))
    return pieces
