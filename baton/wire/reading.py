"""Parse messages that arrive over gRPC, and report an invalid message as its sender's error.

Without this module, gRPC would answer an invalid message with UNKNOWN and a text of the protobuf
library. Long messages are passed on as bytes, which their receiver parses in a thread. Knows no
service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from baton.api.errors import InvalidRequestError
from baton.wire.parts import count_parts

# Maximum number of parts of a client's message. Parsing so many takes less than a tenth of a
# second, in which all other requests wait.
MAX_PARTS = 2**16 + 2**10
# Maximum number of parts of a node's message, which has a part per prompt logprob, and thousands of
# deltas.
MAX_LINK_PARTS = 2**18 + 2**16
# Shorter messages cannot have too many parts.
_SMALL_BYTES = 2**17
# Messages with fewer parts are parsed and handled at once, within 20 ms.
_PARTS_AT_ONCE, _BYTES_AT_ONCE = 2**11, 2**12
# If a message has more fields, the error does not name the field with invalid text.
_MAX_FIELDS_LOOKED_AT = 4_096


@dataclass(frozen=True, slots=True)
class Unread:
    """A message that is not parsed yet, because a thread should parse it.

    Attributes:
        data: the message's bytes.
        read: parses the bytes; returns, rather than raises, an InvalidRequestError.
    """

    data: bytes
    read: Callable[[bytes], Any]

    def message(self) -> Any:
        """Parse the message; raises InvalidRequestError if it is invalid."""
        message = self.read(self.data)
        if isinstance(message, InvalidRequestError):
            raise message
        return message


def patient(deserialize: Callable[[bytes], Any], max_parts: int) -> Callable[[bytes], Any]:
    """Make a deserializer that returns a long message as `Unread`, and parses other messages.

    An invalid message becomes an InvalidRequestError, as in `forgiving`.
    """
    read = forgiving(deserialize, max_parts)
    kind = _kind_of(deserialize)

    def read_or_leave(data: bytes) -> Any:
        if kind is not None and len(data) > _BYTES_AT_ONCE and _has_many_parts(data, kind):
            return Unread(data, read)
        return read(data)

    return read_or_leave


def forgiving(
    deserialize: Callable[[bytes], Any], max_parts: int = MAX_PARTS, max_bytes: int = 2**31
) -> Callable[[bytes], Any]:
    """Make a deserializer that returns, not raises, an InvalidRequestError for invalid messages.

    Args:
        max_parts: refuse messages with more parts; see `baton.wire.parts`.
        max_bytes: refuse messages with more bytes.
    """
    kind = _kind_of(deserialize)
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


def _kind_of(deserialize: Callable[[bytes], Any]) -> type[Message] | None:
    return getattr(deserialize, "__self__", None)


def _has_many_parts(data: bytes, kind: type[Message]) -> bool:
    try:
        return count_parts(data, kind, _PARTS_AT_ONCE) > _PARTS_AT_ONCE
    except DecodeError:
        # The message is invalid, which parsing will report.
        return False


def _check_parts(data: bytes, kind: type[Message], max_parts: int) -> None:
    """Raise InvalidRequestError for too many parts; DecodeError for an invalid message."""
    if count_parts(data, kind, max_parts) > max_parts:
        raise InvalidRequestError(
            "request",
            f"must have at most {max_parts} parts (16 token ids are one)",
        )


def _field_of_wrong_text(data: bytes, descriptor: Descriptor) -> str:
    """Return the path of the first text field that is not UTF-8, or "" if all are UTF-8.

    Such a path is for example ``chat.messages.content``.
    """
    fields_left = [_MAX_FIELDS_LOOKED_AT]
    try:
        return _look(data, descriptor, "", fields_left)
    except (IndexError, ValueError):  # the data ends inside a field
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
