"""Choices of a caller who changes the weights of a running engine or puts the engine to sleep."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from baton.api.errors import InvalidRequestError

Choice = TypeVar("Choice", bound=Enum)


class WhenOpen(Enum):
    """Ways to end requests that are open when weights change.

    ``DRAIN``: open requests run to their end with the old weights. ``ABORT``: open requests end at
    once, with the tokens so far. In both cases, later requests wait until the change is done.
    """

    DRAIN = "drain"
    ABORT = "abort"


class SleepLevel(Enum):
    """Fates of the weights while an engine sleeps.

    ``HOST``: weights are kept in host memory. ``DROPPED``: weights are freed, and read from their
    files again when the engine wakes up. The memory of the KV cache is freed in both cases.
    """

    HOST = "host"
    DROPPED = "dropped"


def read_choice(kind: type[Choice], field: str, value: str) -> Choice:
    """Return the member of an enum with this value; raises InvalidRequestError naming the field."""
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(str(one.value) for one in kind)
        raise InvalidRequestError(field, f"must be {known}, got {value!r:.40}") from None
