"""The error that a client is told for what a node, or the router, said of its request."""

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
    """The exception for a request's error; a code that nobody knows is the engine's fault."""
    message = printable(error.message)
    if error.code == "INVALID_ARGUMENT":
        field_name, _, problem = message.partition(": ")
        return InvalidRequestError(field_name, problem)
    return _ERRORS.get(error.code, EngineDeadError)(message)
