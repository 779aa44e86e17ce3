"""FrameGuard: reads the frames of an HTTP/2 client and decides which may be passed on.

gRPC's core accepts headers of any length, and answers every SETTINGS and PING before any Python
code learns of a call. So the guard reads all frames before gRPC. Header blocks and control frames
pass if they are complete and within limits; the bytes of messages pass unread. A frame that breaks
a rule ends the connection; frames that come too fast wait. While the header block of a call waits
for its turn, PING and WINDOW_UPDATE frames overtake it. The guard does no I/O, and does not know
gRPC.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.serving.http2.header_blocks import HeaderBlockError, HeaderMeter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _CONTINUATION = 6, 7, 9
_WINDOW_UPDATE, _PING_BYTES, _WINDOW_UPDATE_BYTES = 8, 8, 4
_ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x4, 0x8, 0x20
# Costs of frames, where a WINDOW_UPDATE frame costs 1. gRPC answers PING and SETTINGS, and looks at
# each open stream when settings change. Clients send both only a few times per second.
_COSTS = {_SETTINGS: 32.0, _PING: 4.0}
# DATA frames from this length on are cheap: a node sends a message of at least 16 bytes to its
# router in every step, thousands per second.
_TINY_DATA_BYTES, _SHORT_DATA_BYTES = 16, 256
_SHORT_DATA_COST = 1 / 4
_PROTOCOL_ERROR, _CANCEL = 1, 8
_KEPT_STREAMS = 2048  # stream ids to remember: as many streams may be open


class Http2Error(Exception):
    """A client sent a frame that is malformed or too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Limits of what one client may send.

    A small frame is a DATA frame of less than 256 bytes, or a frame that is neither DATA nor part
    of a header block. Reading a small frame costs more than sending it, so costs are limited. A
    WINDOW_UPDATE, a DATA frame of less than 16 bytes, and an acknowledgement cost 1; PING costs 4,
    and SETTINGS costs 32. A longer small DATA frame costs a quarter, because a node sends a message
    of at least 16 bytes in each step.

    Attributes:
        max_block_bytes: maximum number of bytes of a header block as it is sent, with the headers
            of its frames.
        max_header_bytes: maximum number of bytes of the decoded headers, plus 32 for each header.
        max_continuations: maximum number of CONTINUATION frames of one header block.
        max_control_bytes: maximum number of payload bytes of a frame that is neither DATA nor part
            of a header block.
        small_burst: total cost of small frames that may come at once.
        small_per_s: total cost of small frames that may come in each further second.
        sent_bytes_per_small: bytes that the server sends to allow one more unit of cost, because
            clients answer data with WINDOW_UPDATE.
    """

    max_block_bytes: int = 2**14
    max_header_bytes: int = 2**15
    max_continuations: int = 8
    max_control_bytes: int = 2**8
    small_burst: int = 2048
    small_per_s: int = 1024
    sent_bytes_per_small: int = 32


class Hold(enum.Enum):
    """Reasons for which a guard holds back the next frame of a client."""

    CALL = "a header block waits for its turn"
    RATE = "small frames came too fast"


class FrameGuard:
    """Check of the frames of one client.

    Args:
        may_open: called before each header block. If it returns False, the block and all later
            frames are held back until the next `feed`. PING, and WINDOW_UPDATE of open streams,
            still pass, because without an answer to its PING each side closes the connection after
            a minute, and without window updates answers to earlier calls stall.
        clock: returns monotonic seconds.

    Attributes:
        hold: why the next frame is held back; None if all complete frames have passed.
        is_up: whether the client's connection preface and first settings have passed.
        streams: ids of the latest streams that the client opened; some may have ended.
    """

    def __init__(
        self,
        may_open: Callable[[], bool],
        clock: Callable[[], float],
        limits: FrameLimits | None = None,
    ) -> None:
        self.hold: Hold | None = None
        self.is_up = False
        self._may_open = may_open
        self._clock = clock
        self._limits = limits or FrameLimits()
        self._meter = HeaderMeter()
        self._has_preface = False
        self._held = b""
        self.streams = deque[int](maxlen=_KEPT_STREAMS)
        self._num_searched = 0  # held bytes that were searched for frames to let pass
        self._last_stream = 0  # highest id of any opened stream
        self._num_data_bytes = 0  # bytes of the current DATA frame that have not come
        self._budget = float(self._limits.small_burst)  # maximum cost of further small frames
        self._refilled_at = clock()

    def feed(self, data: bytes) -> bytes:
        """Add bytes that the client sent; return the bytes that may be passed on now.

        Raises:
            Http2Error: a frame breaks a rule; close the connection.
        """
        if self._held:
            data = self._held + data
            self._held = b""
        passed = self._num_data_bytes if self._has_preface else self._check_preface(data)
        self._num_data_bytes = 0
        if self._has_preface:
            passed = self._check_frames(data, passed)
        if passed >= len(data):
            self._num_data_bytes = passed - len(data)
            return data
        self._held, self._num_searched = data[passed:], max(self._num_searched - passed, 0)
        if self.hold is Hold.CALL:
            return data[:passed] + self._take_overtaking()
        return data[:passed]

    @property
    def num_held_bytes(self) -> int:
        """Number of bytes that are held back."""
        return len(self._held)

    def note_sent(self, num_bytes: int) -> None:
        """Allow the client more small frames, because the server has sent bytes to the client."""
        limits = self._limits
        allowed = self._budget + num_bytes / limits.sent_bytes_per_small
        self._budget = min(allowed, limits.small_burst)

    def _check_preface(self, data: bytes) -> int:
        """Return the length of the preface, or 0 while the preface is incomplete."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2Error("does not speak HTTP/2")
        self._has_preface = len(data) >= len(PREFACE)
        return len(PREFACE) if self._has_preface else 0

    def _check_frames(self, data: bytes, at: int) -> int:
        """Check the frames from position ``at`` on; return the end of those that may pass.

        The end is beyond the end of ``data`` if the last DATA frame is incomplete.
        """
        self.hold = None
        while at + _HEAD_BYTES <= len(data):
            num_bytes = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            kind = data[at + 3]
            if kind == _HEADERS and self.is_up:
                found = self._read_block(data, at)
                if found is None:
                    break
                if not self._may_open():
                    self.hold = Hold.CALL
                    break
                stream = int.from_bytes(data[at + 5 : at + 9], "big")
                # A header block on a stream that is open already has trailers, and opens no call.
                if stream > self._last_stream:
                    self._last_stream = stream
                    self.streams.append(stream)
                at, block = found
                self._measure(block)
                continue
            if kind != _DATA:
                self._check_control(kind, num_bytes)
                if at + _HEAD_BYTES + num_bytes > len(data):
                    break
            elif int.from_bytes(data[at + 5 : at + 9], "big") > self._last_stream:
                raise Http2Error("sent DATA of a stream that was not opened")
            cost = _cost(kind, data[at + 4], num_bytes)
            if cost and not self._may_spend(cost):
                self.hold = Hold.RATE
                break
            self.is_up = True
            at += _HEAD_BYTES + num_bytes
        return at

    def _take_overtaking(self) -> bytes:
        """Remove from the held bytes the frames that may overtake a held call; return them."""
        data, at, taken = self._held, self._num_searched, b""
        while at + _HEAD_BYTES <= len(data):
            end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
            if data[at + 3] in (_HEADERS, _CONTINUATION):
                found = self._read_block(data, at)
                if found is None:
                    break
                end = found[0]
            elif end > len(data):
                break
            elif self._may_overtake(data[at:end]):
                if not self._may_spend(_cost(data[at + 3], data[at + 4], end - at - _HEAD_BYTES)):
                    break
                data, taken = data[:at] + data[end:], taken + data[at:end]
                continue
            at = end
        self._held, self._num_searched = data, at
        return taken

    def _may_overtake(self, one_frame: bytes) -> bool:
        """Return whether a frame has the same effect if it comes before the held call."""
        kind, num_bytes = one_frame[3], len(one_frame) - _HEAD_BYTES
        if kind == _PING:
            return num_bytes == _PING_BYTES
        stream = int.from_bytes(one_frame[5:_HEAD_BYTES], "big")
        is_update = kind == _WINDOW_UPDATE and num_bytes == _WINDOW_UPDATE_BYTES
        return is_update and stream <= self._last_stream

    def _check_control(self, kind: int, num_bytes: int) -> None:
        limits = self._limits
        if not self.is_up and kind != _SETTINGS:
            raise Http2Error("does not begin with settings")
        if kind in (_PUSH_PROMISE, _CONTINUATION):
            raise Http2Error(f"sent a frame of kind {kind} where none may be")
        if num_bytes > limits.max_control_bytes:
            raise Http2Error(
                f"sent {num_bytes} bytes in a frame of kind {kind}, which may have "
                f"{limits.max_control_bytes}"
            )

    def _may_spend(self, cost: float) -> bool:
        """Take the cost of a small frame from the budget; return False if too little is left."""
        if self._budget < cost:
            limits, now = self._limits, self._clock()
            allowed = self._budget + (now - self._refilled_at) * limits.small_per_s
            self._budget, self._refilled_at = min(allowed, limits.small_burst), now
            if self._budget < cost:
                return False
        self._budget -= cost
        return True

    def _read_block(self, data: bytes, at: int) -> tuple[int, bytes] | None:
        """Return the end of the header block that begins at ``at``, and the block.

        Returns None if the block is incomplete.
        """
        limits, stream, start, block = self._limits, data[at + 5 : at + 9], at, b""
        for number in range(limits.max_continuations + 1):
            if at + _HEAD_BYTES > len(data):
                return None
            if number and (data[at + 3] != _CONTINUATION or data[at + 5 : at + 9] != stream):
                raise Http2Error("sent another frame amid a header block")
            end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
            if end - start > limits.max_block_bytes:
                raise Http2Error(f"sent a header block of more than {limits.max_block_bytes} bytes")
            if end > len(data):
                return None
            block += _fragment(data[at:end])
            if data[at + 4] & _END_HEADERS:
                return end, block
            at = end
        raise Http2Error(f"sent a header block in more than {number + 1} frames")

    def _measure(self, block: bytes) -> None:
        try:
            self._meter.measure(block, self._limits.max_header_bytes)
        except HeaderBlockError as error:
            raise Http2Error(f"sent {error}") from None


def _cost(kind: int, flags: int, num_bytes: int) -> float:
    """Return the cost of a frame (see `FrameLimits`), which is 0 for DATA of 256 bytes or more."""
    if kind == _DATA:
        if num_bytes < _TINY_DATA_BYTES:
            return 1.0
        return _SHORT_DATA_COST if num_bytes < _SHORT_DATA_BYTES else 0.0
    return 1.0 if flags & _ACK else _COSTS.get(kind, 1.0)


def _fragment(frame: bytes) -> bytes:
    """Return the part of a header block that a HEADERS or CONTINUATION frame has."""
    flags = frame[4] if frame[3] == _HEADERS else 0
    start, end = _HEAD_BYTES, len(frame)
    if flags & _PADDED:
        if start == end:
            raise Http2Error("sent a padded frame without a length")
        end -= frame[start]
        start += 1
    if flags & _PRIORITY:
        start += 5
    if start > end:
        raise Http2Error("sent a frame with more padding than it has bytes")
    return frame[start:end]


def goodbye(why: str) -> bytes:
    """Return the bytes that a server sends to a client that it refuses: SETTINGS and GOAWAY."""
    payload = struct.pack(">II", 0, _PROTOCOL_ERROR) + why.encode()
    head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", _GOAWAY, 0, 0)
    return bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0)) + head + payload


def cancel_frame(stream: int) -> bytes:
    """Return the RST_STREAM frame by which a client cancels a call."""
    return struct.pack(">I", 4)[1:] + struct.pack(">BBII", _RST_STREAM, 0, stream, _CANCEL)
