"""Decoding: parses JSON bodies into requests, and finds fields that Baton does not know.

A value of a wrong type becomes an error in one line that names the field. Bodies whose parsing
would take too long are refused before they are parsed.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, get_args

import msgspec

from baton.api.errors import InvalidRequestError
from baton.wrong_values import field_and_problem
from router.api.http.schema import REFUSED, Constraint

T = TypeVar("T")
# Maximum cost of parsing one body. This cost takes about 0.1 s, in which the event loop does
# nothing else. The limit allows a million token ids, or fifty thousand messages. JSON signs inside
# strings are counted too, so the true cost may be less.
MAX_READING_COST = 1_500_000
_COST_OF = {b",": 1, b":": 8, b"[": 10, b"{": 10}
_ESCAPE = re.compile(r"(?:surrogate pair|escape) \(byte (\d+)\)")
_KEY = re.compile(rb'"(\w{1,64})"[ \t\r\n]*+:')
_KEY_WINDOW_BYTES = 1024
_EMPTY = (b"null", b"false", b"[]", b"{}", b'""')
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def decode(body: bytes, kind: type[T], *, strict: bool = False) -> tuple[T, list[str]]:
    """Parse a request's body; also return the names of its fields that have no effect.

    Args:
        kind: the struct of the request's fields.
        strict: whether a field without effect is an error.

    Raises InvalidRequestError naming the wrong or unknown field.
    """
    _check_reading_cost(body)
    with _in_one_line(body, kind):
        # Split the body into fields, without parsing the fields' values.
        given = _decode_fields(body)
        unknown = [*_unknown(given, kind, strict=strict), *_unknown_within(given, kind)]
        if strict and unknown:
            raise InvalidRequestError(unknown[0], "is no field that Baton knows")
        return msgspec.json.decode(body, type=kind), unknown


def prepare_decoding(kind: type) -> None:
    """Build msgspec's tables for a kind of request before the first request arrives.

    Building them for a large request takes about 7 ms.
    """
    kinds = [kind]
    for one in kinds:
        _known(one)
        kinds += [inner for inner in _objects(one).values() if inner not in kinds]
    with contextlib.suppress(msgspec.ValidationError):  # an empty object may lack required fields
        msgspec.json.decode(b"{}", type=kind)


def _unknown(given: Mapping[str, msgspec.Raw], kind: type, *, strict: bool) -> Iterator[str]:
    known = _known(kind)
    for name, value in given.items():
        if name in known:
            continue
        if name in REFUSED and bytes(value) not in _EMPTY:
            raise InvalidRequestError(name, REFUSED[name])
        # An empty value of a refused field asks for nothing, so it is ignored
        if strict or name not in REFUSED:
            yield name


def _unknown_within(given: Mapping[str, msgspec.Raw], kind: type) -> Iterator[str]:
    """Yield unknown fields of the objects inside a request.

    Raises InvalidRequestError for an unknown field of an object that constrains outputs.
    """
    for name, inner_kind in _objects(kind).items():
        if name not in given or bytes(given[name])[:1] != b"{":
            continue
        known, fields = _known(inner_kind), _decode_fields(given[name])
        for inner, value in fields.items():
            if inner in known:
                continue
            if issubclass(inner_kind, Constraint) and bytes(value) not in _EMPTY:
                raise InvalidRequestError(f"{name}.{inner}", "is no field that Baton knows")
            yield f"{name}.{inner}"
        with _below(name):
            for inner in _unknown_within(fields, inner_kind):
                yield f"{name}.{inner}"


@contextmanager
def _below(name: str) -> Iterator[None]:
    """Put the name of the containing object before the fields that errors name."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}.{error.field}", error.problem) from None


@functools.cache
def _known(kind: type) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


@functools.cache
def _objects(kind: type) -> dict[str, type]:
    """Return the fields whose values are objects, and the struct of each object's fields."""
    return {
        field.encode_name: one
        for field in msgspec.structs.fields(kind)
        for one in get_args(field.type)
        if isinstance(one, type) and issubclass(one, msgspec.Struct)
    }


@contextmanager
def _in_one_line(body: bytes, kind: type) -> Iterator[None]:
    """Convert errors of parsing a body to InvalidRequestError, with a message of one line."""
    try:
        yield
    except msgspec.ValidationError as error:
        field, problem = field_and_problem(error, kind)
        raise InvalidRequestError(field or "body", problem) from None
    except msgspec.DecodeError as error:
        found = _ESCAPE.search(str(error))
        field = _key_before(body, int(found[1])) if found else "body"
        raise InvalidRequestError(field, f"is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        position = body.find(error.object)
        raise InvalidRequestError(
            _key_before(body, position), f"is not valid UTF-8 at byte {position + error.start}"
        ) from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None


def _check_reading_cost(body: bytes) -> None:
    if len(body) * max(_COST_OF.values()) <= MAX_READING_COST:
        return
    cost = sum(body.count(sign) * weight for sign, weight in _COST_OF.items())
    if cost > MAX_READING_COST:
        raise InvalidRequestError(
            "body",
            "has too many values: commas, 8 x colons and 10 x opening brackets must be at most "
            f"{MAX_READING_COST} together, got {cost}",
        )


def _key_before(body: bytes, position: int) -> str:
    """Return the key of the value that most likely contains a byte position of the body."""
    keys = _KEY.findall(body, max(position - _KEY_WINDOW_BYTES, 0), position)
    return keys[-1].decode() if keys else "body"
