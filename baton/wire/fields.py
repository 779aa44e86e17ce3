"""Copy fields with equal names between plain values and protobuf messages.

Numbers, texts, bytes and flags are copied, and lists of them. Callers pass all other fields:
messages, enums, and fields whose names differ.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


def to_message(kind: type[_Message], value: object, **others: Any) -> _Message:
    """Make a message of class ``kind`` from a value.

    Args:
        others: values of the message's fields that are not copied from fields of ``value``.
    """
    fields = _common_fields(type(value), kind)  # type: ignore[arg-type]  # classes are hashable
    copied = {one.name: getattr(value, one.name) for one in fields if one.name not in others}
    return kind(**copied, **others)


def from_message(kind: type[_Value], message: Message, **others: Any) -> _Value:
    """Make a value of class ``kind`` from a message; missing fields get defaults.

    Args:
        others: values of the result's fields that are not copied from fields of ``message``.
    """
    copied: dict[str, Any] = {}
    fields = _common_fields(kind, type(message))  # type: ignore[arg-type]  # classes are hashable
    for one in fields:
        if one.name in others or (one.may_be_absent and not message.HasField(one.name)):
            continue
        found = getattr(message, one.name)
        copied[one.name] = tuple(found[:]) if one.is_repeated else found
    return kind(**copied, **others)


class _Field(NamedTuple):
    name: str
    is_repeated: bool
    may_be_absent: bool


@functools.cache
def _common_fields(kind: type, message: type[Message]) -> tuple[_Field, ...]:
    """Return the names of the fields that value and message have in common."""
    names = getattr(kind, "__struct_fields__", None) or [
        field.name for field in dataclasses.fields(kind)
    ]
    known = message.DESCRIPTOR.fields_by_name
    fields = (known[name] for name in names if name in known)
    return tuple(
        _Field(field.name, field.is_repeated, field.has_presence)
        for field in fields
        if field.message_type is None and field.enum_type is None
    )
