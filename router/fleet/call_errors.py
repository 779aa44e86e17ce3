"""Convert errors that nodes or the router report into exceptions for clients."""

from __future__ import annotations

from baton.api.errors import (
    BatonError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NodeUnavailableError,
    OverloadedError,
    RequestCancelledError,
)
from baton.api.printable import printable
from baton.link.words import RequestError

_ERRORS: dict[str, type[BatonError]] = {
    "UNAVAILABLE": NodeUnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "CANCELLED": RequestCancelledError,
}


def error_of(error: RequestError) -> BatonError:
    """Return the exception for a request's error; an unknown code means a fault of the engine."""
    message = printable(error.message)
    if error.code == "INVALID_ARGUMENT":
        field_name, _, problem = message.partition(": ")
        return InvalidRequestError(field_name, problem)
    return _ERRORS.get(error.code, EngineDeadError)(message)
