"""Choices for changing a running engine: what becomes of open requests and of weights."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from baton.api.errors import InvalidRequestError

Choice = TypeVar("Choice", bound=Enum)


class WhenOpen(Enum):
    """Ways to end requests that are open when weights change.

    ``DRAIN``: they end with the old weights. ``ABORT``: they end at once, with the tokens so far.
    Requests that come later wait for the change in either case.
    """

    DRAIN = "drain"
    ABORT = "abort"


class SleepLevel(Enum):
    """Places of the weights during a sleep; the KV cache's memory is always freed.

    ``HOST``: they are kept in host memory. ``DROPPED``: they are freed, and read from their files
    again afterwards.
    """

    HOST = "host"
    DROPPED = "dropped"


def read_choice(kind: type[Choice], field: str, value: str) -> Choice:
    """Return the member with a value; raises InvalidRequestError naming the field."""
    try:
        return kind(value)
    except ValueError:
        known = " or ".join(str(one.value) for one in kind)
        raise InvalidRequestError(field, f"must be {known}, got {value!r:.40}") from None
