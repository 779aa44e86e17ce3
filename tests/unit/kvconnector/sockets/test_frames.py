"""Unit tests of frames: they are read equally from any pieces, and no bytes do harm."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.blocks import LayerRange
from kvconnector.transports.sockets.frames import (
    FROM_DIALLER,
    FROM_LISTENER,
    HEADER,
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    DoneHead,
    Frame,
    FrameError,
    FrameReader,
    Head,
    HelloHead,
    Kind,
    ProbeHead,
    Sink,
    WriteHead,
    cut_parts,
    encode_frame,
)
from kvconnector.transports.sockets.memory import Discard, HostMemory, StagedMemory, memory_of

SHAPE = (6, 3, 2, 4)  # blocks, layers, tokens, bytes; so that a layer has 8 bytes
LAYER_BYTES, BLOCK_BYTES = 8, 24


class Taker:
    """A reader with a cache of its own, of which blocks 1 and 4 may be written."""

    def __init__(self) -> None:
        self.blocks = torch.zeros(SHAPE, dtype=torch.uint8)
        self.memory = HostMemory(self.blocks)
        self.frames: list[Frame] = []
        self.reader = FrameReader(FROM_DIALLER, self.open_sink)

    def open_sink(self, head: Head, payload_bytes: int) -> Sink:
        if not isinstance(head, WriteHead) or not {1, 4}.issuperset(head.block_ids):
            return Discard(payload_bytes)
        if payload_bytes != self.memory.num_bytes(len(head.block_ids), head.layers):
            raise FrameError("another size")
        return self.memory.sink(head.block_ids, head.layers, lambda: True)

    def feed(self, data: bytes, most: int = 2**20) -> None:
        """Feed bytes as a socket does, in parts of at most ``most`` bytes that fit the buffer."""
        left = memoryview(data)
        while left:
            room = self.reader.buffer()
            assert len(room) > 0
            part = left[: min(len(room), most)]
            room[: len(part)] = part
            frame = self.reader.advance(len(part))
            if frame is not None:
                self.frames.append(frame)
            left = left[len(part) :]

    def untouched(self) -> bool:
        return not self.blocks[[0, 2, 3, 5]].any()


def write_frame(block_ids: list[int], payload: bytes, layers: LayerRange | None = None) -> bytes:
    head = WriteHead("a", 7, block_ids, layers)
    return encode_frame(Kind.WRITE, head, len(payload)) + payload


FRAMES = [
    (encode_frame(Kind.HELLO, HelloHead("p", "d")), Frame(Kind.HELLO, HelloHead("p", "d"))),
    (encode_frame(Kind.MESSAGE, b"some bytes"), Frame(Kind.MESSAGE, b"some bytes")),
    (encode_frame(Kind.MESSAGE, b""), Frame(Kind.MESSAGE, b"")),
    (
        write_frame([4, 1], bytes(range(2 * BLOCK_BYTES))),
        Frame(Kind.WRITE, WriteHead("a", 7, [4, 1], None)),
    ),
    (
        write_frame([1], b"\xff" * LAYER_BYTES, (1, 2)),
        Frame(Kind.WRITE, WriteHead("a", 7, [1], (1, 2))),
    ),
    (
        write_frame([1, 2], b"\xee" * 2 * BLOCK_BYTES),
        Frame(Kind.WRITE, WriteHead("a", 7, [1, 2], None), is_taken=False),
    ),
    (
        encode_frame(Kind.PROBE, ProbeHead(3), 5) + b"12345",
        Frame(Kind.PROBE, ProbeHead(3), is_taken=False),
    ),
]


@given(most=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_frames_are_read_the_same_however_they_are_cut(most: int) -> None:
    taker = Taker()
    taker.feed(b"".join(data for data, _ in FRAMES), most)
    assert taker.frames == [frame for _, frame in FRAMES]
    assert not taker.reader.is_amid
    expected = torch.zeros(SHAPE, dtype=torch.uint8)
    expected.view(6, -1)[4] = torch.arange(BLOCK_BYTES)
    expected.view(6, -1)[1] = torch.arange(BLOCK_BYTES, 2 * BLOCK_BYTES)
    expected[1, 1] = 255
    assert torch.equal(taker.blocks, expected)


_HEADERS = st.builds(
    HEADER.pack,
    st.integers(0, 255),
    st.integers(0, 64) | st.integers(0, 2**32 - 1),
    st.integers(0, 64) | st.integers(0, 2**64 - 1),
)
_HEADS = st.builds(
    lambda kind, head, payload: encode_frame(kind, head, len(payload)) + payload,
    st.sampled_from(Kind),
    st.binary(max_size=40)
    | st.builds(
        WriteHead,
        st.text(max_size=4),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(-3, 9), max_size=4),
        st.none() | st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    ),
    st.binary(max_size=80),
)


@pytest.mark.medium
@given(st.lists(st.binary(max_size=60) | _HEADERS | _HEADS, max_size=8), st.integers(1, 64))
@settings(max_examples=400, deadline=None)
def test_no_bytes_crash_the_reader_or_write_what_is_not_granted(
    parts: list[bytes], most: int
) -> None:
    taker = Taker()
    with contextlib.suppress(FrameError):
        taker.feed(b"".join(parts), most)
    assert taker.untouched()
    assert taker.reader._part.nbytes <= MAX_HEAD_BYTES


@pytest.mark.medium
@given(st.integers(0, len(FRAMES) - 1), st.data())
@settings(max_examples=200, deadline=None)
def test_a_frame_with_one_bit_turned_writes_nothing_that_is_not_granted(
    index: int, data: st.DataObject
) -> None:
    frame = bytearray(FRAMES[index][0])
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= 1 << data.draw(st.integers(0, 7))
    taker = Taker()
    with contextlib.suppress(FrameError):
        taker.feed(bytes(frame))
    assert taker.untouched()


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ((0, 0, 0), "a frame of unexpected kind 0"),
        ((Kind.WELCOME, 0, 0), "a frame of unexpected kind 5"),
        ((Kind.MESSAGE, MAX_HEAD_BYTES + 1, 0), "a head of"),
        ((Kind.MESSAGE, 1, 1), "an unexpected payload of 1 bytes"),
        ((Kind.WRITE, 1, 0), "an unexpected payload of 0 bytes"),
        ((Kind.WRITE, 1, MAX_PAYLOAD_BYTES + 1), "an unexpected payload of"),
    ],
)
def test_a_header_that_no_peer_sends_is_refused_before_any_memory_is_taken(
    header: tuple[int, int, int], what: str
) -> None:
    with pytest.raises(FrameError, match=what):
        Taker().feed(HEADER.pack(*header))


def test_a_head_that_is_no_head_is_refused() -> None:
    for head in (
        b"",
        b"\xc1",
        b"\x93\xa1a\x00",
        b"\x94\xa1a\x00\x91\xd1\xff\xff\xc0",
        b"\x81" * 99,
    ):
        with pytest.raises(FrameError, match="a head of a WRITE"):
            Taker().feed(HEADER.pack(Kind.WRITE, len(head), 8) + head)


def test_a_listener_says_welcome_and_done_and_nothing_else() -> None:
    reader = FrameReader(FROM_LISTENER, lambda head, payload_bytes: Discard(payload_bytes))
    data = encode_frame(Kind.WELCOME) + encode_frame(Kind.DONE, DoneHead(2, False))
    frames = []
    for byte in data:
        reader.buffer()[0] = byte
        frame = reader.advance(1)
        if frame is not None:
            frames.append(frame)
    assert frames == [Frame(Kind.WELCOME, b""), Frame(Kind.DONE, DoneHead(2, False))]
    reader.buffer()[:] = HEADER.pack(Kind.MESSAGE, 0, 0)
    with pytest.raises(FrameError, match="kind 2"):
        reader.advance(HEADER.size)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_parts_are_cut_and_joined_without_losing_a_byte(parts: list[bytes], size: int) -> None:
    most = 4 * size
    pieces = cut_parts(parts, most)
    assert b"".join(pieces) == b"".join(parts)
    assert all(0 < len(piece) <= most for piece in pieces)


@pytest.mark.parametrize("kind", [HostMemory, StagedMemory])
@pytest.mark.parametrize("layers", [None, (0, 1), (1, 3)])
def test_both_memories_read_and_take_the_same_bytes(
    kind: type[HostMemory | StagedMemory], layers: LayerRange | None
) -> None:
    """Staging is what a GPU's memory needs; it works on any, so it is tested here, too."""
    source = torch.randint(0, 256, SHAPE, dtype=torch.uint8)
    target = torch.zeros_like(source)
    data = b"".join(kind(source).read([5, 0, 1], layers))
    part = slice(None) if layers is None else slice(*layers)
    assert data == source[[5, 0, 1], part].numpy().tobytes()
    memory = kind(target)
    assert memory.num_bytes(3, layers) == len(data)
    sink = memory.sink([2, 3, 4], layers, lambda: True)
    fill(sink, data)
    assert sink.finish_payload()
    expected = torch.zeros_like(source)
    expected[[2, 3, 4], part] = source[[5, 0, 1], part]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("kind", [HostMemory, StagedMemory])
def test_a_grant_that_ends_amid_a_payload_ends_the_writing_there(
    kind: type[HostMemory | StagedMemory],
) -> None:
    target = torch.zeros(SHAPE, dtype=torch.uint8)
    allowed = True
    sink = kind(target).sink([1, 2], None, lambda: allowed)
    fill(sink, b"\x01" * (BLOCK_BYTES + 10))
    allowed = False
    fill(sink, b"\x02" * (BLOCK_BYTES - 10))
    assert not sink.finish_payload()
    assert not (target == 2).any()
    assert int((target == 1).sum()) == (BLOCK_BYTES + 10 if kind is HostMemory else 0)
    allowed = True  # too late: what did not come in would be missing
    assert not sink.finish_payload()


def test_only_host_memory_is_written_where_it_lies() -> None:
    assert isinstance(memory_of(torch.zeros(SHAPE)), HostMemory)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        blocks = torch.zeros(SHAPE, dtype=dtype)
        (view,) = memory_of(blocks).read([0, 1], None)
        assert view.nbytes == 2 * blocks[0].nbytes


def fill(sink: Sink, data: bytes) -> None:
    left = memoryview(data)
    while left:
        room = sink.buffer()
        part = left[: min(len(room), 5)]
        room[: len(part)] = part
        sink.advance(len(part))
        left = left[len(part) :]
