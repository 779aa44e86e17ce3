"""Reading what others send over gRPC: what is no message, or of too many parts, is their error.

gRPC itself would answer UNKNOWN, with words of the protobuf library. Knows no service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from baton.errors import InvalidRequestError
from baton.wire_parts import count_parts

# Of one message of a client: it is read in less than a tenth of a second, in which nothing else is
# served.
MAX_PARTS = 2**16 + 2**10
# Of one message of a node, which has a part for each logprob of a prompt, and thousands of deltas.
MAX_LINK_PARTS = 2**18 + 2**16
# Less cannot have so many that it matters.
_SMALL_BYTES = 2**17
# Beyond so many, whoever sent them has to find out what is wrong.
_MAX_FIELDS_LOOKED_AT = 4_096


def forgiving(
    deserialize: Callable[[bytes], Any], max_parts: int = MAX_PARTS, max_bytes: int = 2**31
) -> Callable[[bytes], Any]:
    """A deserializer that gives an InvalidRequestError, not raised, for what is no message.

    Args:
        max_parts: a message that has more is not read; see `baton.wire_parts`.
        max_bytes: nor is one that is longer.
    """
    kind: type[Message] | None = getattr(deserialize, "__self__", None)
    descriptor: Descriptor | None = getattr(kind, "DESCRIPTOR", None)

    def read(data: bytes) -> Any:
        if len(data) > max_bytes:
            return InvalidRequestError(
                "request", f"must have at most {max_bytes} bytes, got {len(data)}"
            )
        try:
            if len(data) > _SMALL_BYTES and kind is not None:
                _check_parts(data, kind, max_parts)
            return deserialize(data)
        except InvalidRequestError as error:
            return error
        except DecodeError:
            field = _field_of_wrong_text(data, descriptor) if descriptor is not None else ""
            if field:
                return InvalidRequestError(field, "is not valid UTF-8")
            return InvalidRequestError("request", "is no message of this call")

    return read


def _check_parts(data: bytes, kind: type[Message], max_parts: int) -> None:
    """Raise InvalidRequestError for more; DecodeError for what is no message."""
    if count_parts(data, kind, max_parts) > max_parts:
        raise InvalidRequestError(
            "request",
            f"must have at most {max_parts} parts (16 token ids are one)",
        )


def _field_of_wrong_text(data: bytes, descriptor: Descriptor) -> str:
    """The first text field that is not UTF-8, as ``chat.messages.content``; empty: none found."""
    fields_left = [_MAX_FIELDS_LOOKED_AT]
    try:
        return _look(data, descriptor, "", fields_left)
    except (IndexError, ValueError):  # it ends in the middle of something
        return ""


def _look(data: bytes, descriptor: Descriptor, path: str, fields_left: list[int]) -> str:
    position = 0
    while position < len(data) and fields_left[0]:
        fields_left[0] -= 1
        tag, position = _varint(data, position)
        field = descriptor.fields_by_number.get(tag >> 3)
        match tag & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 5:
                position += 4
            case 2:
                length, position = _varint(data, position)
                part, position = data[position : position + length], position + length
                found = _look_into(part, field, path, fields_left) if field else ""
                if found:
                    return found
            case _:
                raise ValueError
    return ""


def _look_into(part: bytes, field: FieldDescriptor, path: str, fields_left: list[int]) -> str:
    name = f"{path}{field.name}"
    if field.message_type is not None:
        return _look(part, field.message_type, f"{name}.", fields_left)
    if field.type != FieldDescriptor.TYPE_STRING:
        return ""
    try:
        part.decode()
    except UnicodeDecodeError:
        return name
    return ""


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError
