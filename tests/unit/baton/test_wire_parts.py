"""Unit tests of the number of parts of a message, which is known before the message is read."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import InvalidRequestError
from baton.link.message_cuts import MAX_LINK_DELTAS, MAX_PARTS, cut_message
from baton.v1 import inference_pb2, node_pb2, types_pb2
from baton.wire.parts import count_parts
from baton.wire.reading import MAX_LINK_PARTS, forgiving

MANY = 10**9


def count(message: Message) -> int:
    return count_parts(message.SerializeToString(), type(message), MANY)


def test_every_field_and_every_message_is_a_part_and_texts_are_one_however_long() -> None:
    assert count(inference_pb2.GenerateRequest()) == 0
    messages = [inference_pb2.ChatMessage(role="user", content="x" * 1000)] * 3
    chat = inference_pb2.Chat(messages=messages)
    assert count(inference_pb2.GenerateRequest(chat=chat, priority=7)) == 1 + 3 * 3 + 1
    empty = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * 1000)
    assert count(inference_pb2.Prompt(chat=empty)) == 1 + 1000


def test_messages_inside_messages_of_their_own_kind_are_counted() -> None:
    value = struct_pb2.Value(bool_value=True)
    for _ in range(3):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    assert count(value) == 3 * 2 + 1


def test_16_packed_numbers_are_a_part() -> None:
    ids = types_pb2.TokenIds(ids=[100_000] * 32_000)
    assert 2000 <= count(inference_pb2.Prompt(token_ids=ids)) <= 2005
    assert 2000 <= count(node_pb2.StepDeltas(token_ids=[1] * 32_000)) <= 2005


def test_the_longest_prompts_of_today_are_read() -> None:
    ids = types_pb2.TokenIds(ids=[200_000] * 2**20)
    request = inference_pb2.GenerateRequest(token_ids=ids, request_id="r")
    read = forgiving(inference_pb2.GenerateRequest.FromString)(request.SerializeToString())
    assert len(read.token_ids.ids) == 2**20


def test_numbers_that_are_written_longer_than_needed_count_for_more() -> None:
    data = b"\x8a\x80\x80\x80\x00\x00" * 1000  # field 1, empty
    assert count_parts(data, inference_pb2.Chat, MANY) >= 8000


def test_it_stops_where_there_are_too_many() -> None:
    data = b"\x0a\x00" * 10**6
    assert count_parts(data, inference_pb2.Chat, 100) == 101


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05abc", b"\x0a\x02\x0a\x7f\x0a\x00", b"\x08" + b"\xff" * 99, b"\x0b\x0c"],
    ids=["no length", "too short", "longer than what it is in", "endless number", "group"],
)
def test_what_is_no_message_is_said(data: bytes) -> None:
    with pytest.raises(DecodeError):
        count_parts(data, inference_pb2.Chat, MANY)


@given(st.binary(max_size=200))
def test_whatever_comes_it_counts_or_says_that_it_is_no_message(data: bytes) -> None:
    kinds: list[type[Message]] = [node_pb2.NodeMessage, inference_pb2.GenerateRequest]
    for kind in kinds:
        with contextlib.suppress(DecodeError):
            assert count_parts(data, kind, MANY) <= 9 * len(data)


@pytest.mark.medium
def test_the_most_that_a_node_says_in_a_message_is_read() -> None:
    logprobs = [types_pb2.TokenLogprobs(logprob=-1.5)] * (MAX_PARTS - 1)
    long = node_pb2.RequestDelta(request_id="r", epoch=1, token_ids=[1], prompt_logprobs=logprobs)
    short = node_pb2.RequestDelta(
        request_id="r",
        epoch=1,
        output_index=9,
        token_ids=[1],
        finish_reason=types_pb2.FINISH_REASON_STOP,
        decode=types_pb2.DecodeReceipt(
            parked_s=1, first_step_s=1, push=types_pb2.PushReceipt(num_bytes=1)
        ),
    )
    step = node_pb2.StepDeltas(deltas=[long, *[short] * (2 * MAX_LINK_DELTAS)])
    read = forgiving(node_pb2.NodeMessage.FromString, MAX_LINK_PARTS)
    for part in cut_message(node_pb2.NodeMessage(deltas=step)):
        assert read(part.SerializeToString()) == part


@pytest.mark.parametrize(
    "delta",
    [b"\x0a\x00", b"\x0a\x02\x10\x01", b"\x0a\x04\x4a\x00\x4a\x00", b"\xb0\x01\x01"],
    ids=["empty", "small", "logprobs", "rows one by one"],
)
def test_eight_megabytes_of_tiny_parts_from_a_node_are_refused_unread(delta: bytes) -> None:
    body = delta * (8 * 2**20 // len(delta) - 10)
    message = b"\x12" + _varint(len(body)) + body
    error = forgiving(node_pb2.NodeMessage.FromString, MAX_LINK_PARTS)(message)
    assert isinstance(error, InvalidRequestError)
    assert "must have at most 327680 parts" in str(error)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
