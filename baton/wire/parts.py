"""Count the parts of a protobuf message, to refuse messages that take too long to parse.

Parsing time depends on the number of parts, not on the number of bytes. Megabytes of text take
almost no time. Megabytes of empty messages take most of a second, which blocks all other requests,
and fifty times their size in memory.

    [tag len [tag len text] [tag len text] ...]     one for each tag
    [tag len 7 8 9 ...]                             one more for every 16 packed numbers
    [a number of many bytes ...]                    some more, because they take long to count
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeAlias, Union

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

_NUMBERS_OF_A_PART = 16  # so many numbers take as long to parse as a message
_LONG_NUMBER, _LONG_TAG = 2, 8  # additional parts of a long number or tag
_NOT_THE_LAST = bytes(range(128, 256))  # bytes after which a number goes on
_MAX_VARINT_BYTES = 10

# Tag of a message's field -> the table of the field's own fields if it is a message, or None for
# packed numbers. Texts and unknown fields are not in the table, and are skipped.
_Inside: TypeAlias = Mapping[int, Union["_Inside", None]]
_PASSED_OVER: _Inside = {}


def count_parts(data: bytes, kind: type[Message], limit: int) -> int:
    """Count the parts of a message, including those of messages inside it.

    Args:
        kind: class of the message.
        limit: counting stops above this number; a larger result only means "more than the limit".

    Raises DecodeError for invalid messages.
    """
    try:
        return _count(data, _inside(kind.DESCRIPTOR), limit)
    except IndexError:  # the data ends inside a field
        raise DecodeError from None


def _count(data: bytes, fields: _Inside, limit: int) -> int:
    """Count parts in one loop without calls, which is fast for hundreds of thousands of parts."""
    position, end, num_parts = 0, len(data), 0
    # For each enclosing message: the position of its end, and the table of its fields.
    around: list[tuple[int, _Inside]] = []
    while num_parts <= limit:
        if position >= end:
            if position > end:
                raise DecodeError
            if not around:
                break
            end, fields = around.pop()
            continue
        num_parts += 1
        tag = data[position]
        position += 1
        if tag > 127:
            if data[position] < 128:  # field numbers up to 2047
                tag = tag & 127 | data[position] << 7
                position += 1
            else:
                tag, position = _varint(data, position - 1)
                num_parts += _LONG_TAG
        kind = tag & 7
        if kind == 2:
            length = data[position]
            position += 1
            if length > 127:
                if data[position] < 128:
                    length = length & 127 | data[position] << 7
                    position += 1
                else:
                    length, position = _varint(data, position - 1)
                    num_parts += _LONG_NUMBER
            inside = fields.get(tag, _PASSED_OVER)
            if inside is None:
                num_parts += _num_numbers(data, position, length) // _NUMBERS_OF_A_PART
            elif inside is not _PASSED_OVER:
                around.append((end, fields))
                if position + length > end:
                    raise DecodeError
                end, fields = position + length, inside
                continue
            position += length
        elif kind == 0:
            if data[position] < 128:
                position += 1
            elif data[position + 1] < 128:
                position += 2
            else:
                _, position = _varint(data, position)
                num_parts += _LONG_NUMBER
        elif kind == 5:
            position += 4
        elif kind == 1:
            position += 8
        # The field is a group, which Baton's messages do not use.
        else:
            raise DecodeError
    return num_parts


def _num_numbers(data: bytes, position: int, length: int) -> int:
    if length < _NUMBERS_OF_A_PART:
        return 0
    return len(data[position : position + length].translate(None, _NOT_THE_LAST))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = data[position] & 127
    for shift in range(7, 7 * _MAX_VARINT_BYTES + 7, 7):
        if data[position] < 128:
            return value, position + 1
        position += 1
        value |= (data[position] & 127) << shift
    raise DecodeError


@functools.cache
def _inside(descriptor: Descriptor) -> _Inside:
    return _table_of(descriptor, {})


def _table_of(descriptor: Descriptor, tables: dict[str, dict[int, _Inside | None]]) -> _Inside:
    """Return a message's table of fields.

    Args:
        tables: tables begun so far, by message name, because a message may contain itself.
    """
    if descriptor.full_name in tables:
        return tables[descriptor.full_name]
    found = tables[descriptor.full_name] = {}
    for field in descriptor.fields:
        message = field.message_type
        if message is not None:
            is_plain = _has_numbers_only(message)
            found[_tag(field)] = None if is_plain else _table_of(message, tables)
        elif _is_number(field):
            found[_tag(field)] = None
    return found


def _tag(field: FieldDescriptor) -> int:
    """Return the tag of a field that is a message or packed numbers."""
    return int(field.number) << 3 | 2


def _is_number(field: FieldDescriptor) -> bool:
    return field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)


def _has_numbers_only(message: Descriptor) -> bool:
    return all(map(_is_number, message.fields))
