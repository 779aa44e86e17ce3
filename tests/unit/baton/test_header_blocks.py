"""Test HeaderMeter (sizes of decoded header blocks) and FrameGuard (frames that may pass)."""

from __future__ import annotations

import pytest

from baton.api.outputs import RequestDelta
from baton.link.wire import node_event_to_proto
from baton.serving.http2.frames import FrameGuard, FrameLimits, Hold, Http2Error
from baton.serving.http2.header_blocks import HeaderBlockError, HeaderMeter
from tests.fakes.network.http2_tricks import ACK, block, flood, headers, integer, literal
from tests.fakes.network.raw_http2 import (
    DATA,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

MOST = 2**15
BEGIN = PREFACE + frame(SETTINGS)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def guard(limits: FrameLimits | None = None, clock: Clock | None = None) -> FrameGuard:
    """Make a guard whose client has come up."""
    made = FrameGuard(lambda: True, clock or Clock(), limits)
    assert made.feed(BEGIN) == BEGIN
    return made


# ------------------------------------------------------------------ sizes


def test_a_field_counts_with_its_characters_and_32() -> None:
    assert HeaderMeter().measure(literal(b"name", b"value"), MOST) == 4 + 5 + 32


def test_a_field_of_the_static_table_counts_as_the_longest_of_that() -> None:
    assert HeaderMeter().measure(b"\x82", MOST) == 60


def test_text_in_huffman_code_counts_as_the_longest_that_it_can_be() -> None:
    coded = b"\0" + integer(5, 7, 0x80) + b"abcde" + integer(10, 7, 0x80) + b"0123456789"
    assert HeaderMeter().measure(coded, MOST) == 8 + 16 + 32


def test_a_remembered_field_counts_each_time() -> None:
    meter = HeaderMeter()
    assert meter.measure(literal(b"k", b"v" * 1000, insert=True), MOST) == 1033
    assert meter.measure(literal(b"l", b"w", insert=True), MOST) == 34
    assert meter.measure(integer(63, 7, 0x80) * 3, MOST) == 3 * 1033
    assert meter.measure(integer(62, 7, 0x80), MOST) == 34
    # Its name alone, with a value of two characters.
    assert meter.measure(integer(63, 4) + b"\2ab", MOST) == 1 + 2 + 32


def test_a_header_with_a_new_value_in_each_call_never_grows() -> None:
    meter = HeaderMeter()
    assert meter.measure(literal(b"traceparent", bytes(55), insert=True), MOST) == 98
    for _ in range(2000):  # as Go, nghttp2 and Netty write it: the name of the entry before
        assert meter.measure(integer(62, 6, 0x40) + integer(55, 7) + bytes(55), MOST) == 98


@pytest.mark.parametrize(
    "coded",
    [
        integer(62, 7, 0x80),
        b"\x80",
        b"\0\5ab",
        b"\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\0\1a",
        b"\0\x7f\xff\xff\xff\xff\xff",
    ],
    ids=["no such entry", "entry 0", "cut", "a long index", "no value", "a long string"],
)
def test_a_malformed_block_is_refused(coded: bytes) -> None:
    with pytest.raises(HeaderBlockError, match="malformed"):
        HeaderMeter().measure(coded, MOST)


def test_a_bomb_is_refused_after_few_fields() -> None:
    meter = HeaderMeter()
    meter.measure(literal(b"k", b"v" * 3900, insert=True), MOST)
    with pytest.raises(HeaderBlockError, match="more than 32768 bytes"):
        meter.measure(b"\xbe" * 3000, MOST)
    assert meter.measure(b"\xbe" * 8, MOST) == 8 * 3933


def test_no_more_than_128_fields_are_remembered() -> None:
    meter = HeaderMeter()
    for _ in range(200):
        meter.measure(literal(b"k", b"v", insert=True), MOST)
    meter.measure(integer(61 + 128, 7, 0x80), MOST)
    with pytest.raises(HeaderBlockError):
        meter.measure(integer(61 + 129, 7, 0x80), MOST)


# ------------------------------------------------------------------ frames


def test_frames_pass_as_they_are_however_they_are_cut() -> None:
    call = headers(1, block()) + frame(DATA, 0, 1, bytes(70)) + frame(PING, 0, 0, bytes(8))
    for size in (1, 2, 9, 10, 50, 1000):
        one, passed = guard(), b""
        for at in range(0, len(call), size):
            passed += one.feed(call[at : at + size])
        assert passed == call


def test_a_block_passes_when_it_is_whole() -> None:
    one = guard()
    first = frame(HEADERS, 0, 1, block()[:20])
    rest = frame(9, 4, 1, block()[20:])
    assert one.feed(first) == b""
    assert one.feed(rest) == first + rest


def test_padding_and_priority_are_no_part_of_a_block() -> None:
    payload = b"\3" + bytes(5) + block() + bytes(3)
    whole = frame(HEADERS, 4 | 8 | 0x20, 1, payload)
    assert guard().feed(whole) == whole
    with pytest.raises(Http2Error, match="more padding"):
        guard().feed(frame(HEADERS, 4 | 8, 1, b"\xff"))


UPDATES = flood(WINDOW_UPDATE, bytes([0, 0, 0, 1]))
UPDATE_BYTES = 13


def test_small_frames_beyond_a_rate_wait() -> None:
    clock = Clock()
    one = guard(FrameLimits(small_burst=42, small_per_s=10), clock)  # settings cost 32
    assert len(one.feed(next(UPDATES))) == 10 * UPDATE_BYTES
    assert one.hold is Hold.RATE
    assert one.feed(b"") == b""
    clock.now_s = 1.0
    assert len(one.feed(b"")) == 10 * UPDATE_BYTES


def test_what_the_server_sends_allows_small_frames() -> None:
    one = guard(FrameLimits(small_burst=42, small_per_s=1, sent_bytes_per_small=32))
    one.feed(next(UPDATES))
    one.note_sent(160)
    assert len(one.feed(b"")) == 5 * UPDATE_BYTES


@pytest.mark.parametrize(
    ("one_frame", "num_at_once"),
    [
        (frame(SETTINGS), 63),  # and those that the client began with
        (frame(SETTINGS, ACK), 63 * 32),
        (frame(PING, 0, 0, bytes(8)), 63 * 8),
        (frame(PING, ACK, 0, bytes(8)), 63 * 32),
        (frame(WINDOW_UPDATE, 0, 0, bytes([0, 0, 0, 1])), 63 * 32),
        (frame(DATA, 0, 1, bytes(15)), 63 * 32),
        (frame(DATA, 0, 1, bytes(255)), 63 * 128),
    ],
    ids=["SETTINGS", "SETTINGS ack", "PING", "PING ack", "WINDOW_UPDATE", "tiny DATA", "DATA"],
)
def test_frames_that_cost_more_come_less_often(one_frame: bytes, num_at_once: int) -> None:
    one = guard()
    one.feed(headers(1, block()))
    assert len(one.feed(one_frame * 17_000)) == num_at_once * len(one_frame)


def test_a_node_may_tell_of_any_number_of_steps() -> None:
    """Regression: only a thousand steps a second passed, so a faster node's tokens came late."""
    step = (RequestDelta("a", 0, (1,), epoch=1),)
    message = node_event_to_proto(step).SerializeToString()
    data = b"\0" + len(message).to_bytes(4, "big") + message
    one = guard()
    steps = headers(1, block()) + frame(DATA, 0, 1, data) * 8000
    assert one.feed(steps) == steps
    assert one.hold is None


def waiting_guard(limits: FrameLimits | None = None) -> tuple[FrameGuard, list[bool]]:
    """Return a guard that lets a call pass for each True in the list."""
    turns: list[bool] = []
    return FrameGuard(lambda: bool(turns and turns.pop()), Clock(), limits), turns


def update(stream: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, bytes([0, 0, 0, 1]))


def test_a_call_waits_for_its_turn_and_messages_and_settings_behind_it() -> None:
    one, turns = waiting_guard()
    calls = [headers(stream, block()) + frame(DATA, 1, stream, bytes(300)) for stream in (1, 3)]
    settings = frame(SETTINGS, ACK)
    assert one.feed(BEGIN + calls[0] + settings + calls[1]) == BEGIN
    assert one.hold is Hold.CALL
    turns.append(True)
    assert one.feed(b"") == calls[0] + settings
    assert one.hold is Hold.CALL
    turns.append(True)
    assert one.feed(b"") == calls[1]
    assert one.hold is None


def test_pings_and_windows_of_what_is_open_overtake_calls_that_wait() -> None:
    """Regression: the answer to a server's keepalive waited, and gRPC ended the connection."""
    one, turns = waiting_guard()
    turns.append(True)
    begun = headers(1, block())
    assert one.feed(BEGIN + begun) == BEGIN + begun
    pings = [frame(PING, flags, 0, bytes([flags] * 8)) for flags in (0, ACK)]
    calls = [headers(stream, block()) + frame(DATA, 1, stream, bytes(300)) for stream in (3, 5)]
    held = b"".join([calls[0], update(0), pings[0], calls[1], update(1), update(3), pings[1]])
    overtaking = update(0) + pings[0] + update(1) + pings[1]
    passed = b""
    for at in range(len(held)):  # however they are cut
        passed += one.feed(held[at : at + 1])
    assert passed == overtaking
    assert one.num_held_bytes == len(held) - len(overtaking)
    turns.append(True)
    assert one.feed(pings[0]) == calls[0] + pings[0]
    turns.append(True)
    assert one.feed(b"") == calls[1] + update(3)
    assert one.hold is None


def test_what_overtakes_costs_as_much_as_in_its_turn() -> None:
    one, turns = waiting_guard(FrameLimits(small_burst=42, small_per_s=10))  # settings cost 32
    call, ping = headers(1, block()), frame(PING, 0, 0, bytes(8))
    assert one.feed(BEGIN + call + 5 * ping) == BEGIN + 2 * ping
    turns.append(True)
    assert one.feed(b"") == call
    assert one.hold is Hold.RATE
    assert one.num_held_bytes == 3 * len(ping)


def test_a_frame_amid_a_header_block_is_refused_behind_a_call_that_waits() -> None:
    one, _ = waiting_guard()
    torn = frame(HEADERS, 0, 3, block()[:20]) + frame(PING, 0, 0, bytes(8))
    with pytest.raises(Http2Error, match="amid a header block"):
        one.feed(BEGIN + headers(1, block()) + torn)
