"""Errors: Baton's exception classes, and their status codes in gRPC and HTTP.

    BatonError
    ├── InvalidRequestError     a request's field is outside its limit           INVALID_ARGUMENT
    │   └── PromptTooLongError  a prompt has more tokens than the model accepts  INVALID_ARGUMENT
    ├── PoisonRequestError      nodes died while computing an equal request      FAILED_PRECONDITION
    ├── UnauthenticatedError    a call has no valid API key                      UNAUTHENTICATED
    ├── PermissionDeniedError   the caller may not do this                       PERMISSION_DENIED
    ├── ConfigError             a program's option or file is wrong              (start-up only)
    │   └── ModelLoadError      a model folder is missing, broken or unsupported
    ├── NotFoundError           no node or request of that name                  NOT_FOUND
    ├── OverloadedError         no capacity now; try again later                 RESOURCE_EXHAUSTED
    ├── NodeUnavailableError    a node or the router cannot be reached           UNAVAILABLE
    ├── DeadlineExceededError   an absolute deadline passed                      DEADLINE_EXCEEDED
    ├── RequestCancelledError   the client or an operator ended the request      CANCELLED
    ├── TransferError           KV blocks did not arrive                         UNAVAILABLE
    ├── DamagedModelError       a model computes NaN or infinite logits          INTERNAL
    └── EngineDeadError         the engine of a node cannot continue             INTERNAL

Status codes are named by string so that this file needs no gRPC.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from baton.api.printable import printable

if TYPE_CHECKING:
    from baton.api.outputs import Receipt, RequestError


MAX_QUOTED_CHARS = 2_000
# Words with which torch's allocators report too little memory in a `RuntimeError`.
_NO_MEMORY = re.compile(r"out of memory|allocate memory|not enough memory", re.IGNORECASE)


def reason_of(error: Exception) -> str:
    """Return why an action failed, for a message that already names the file."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or of torch reports too little memory."""
    if isinstance(error, RuntimeError):
        return _NO_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError)


class BatonError(Exception):
    """Base class of all errors that Baton raises deliberately.

    Attributes:
        retryable: whether the same request may succeed later.
        retry_delay_s: how long to wait before a retry; None: do not retry.
        receipt: cost of the request until it failed, as far as known.
    """

    retryable: ClassVar[bool] = False
    retry_delay_s: float | None = None
    receipt: Receipt | None = None


class InvalidRequestError(BatonError, ValueError):
    """A request's field is outside its limit; the message names field and limit.

    Args:
        field: name of the field as users write it, for example ``max_tokens``.
        problem: the fault and the limit, in one line.
    """

    def __init__(self, field: str, problem: str) -> None:
        field, problem = _shortened(field), _shortened(problem)
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def of_field(self, field: str) -> InvalidRequestError:
        """Return this error with the client's name for the field."""
        return InvalidRequestError(field, self.problem)


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than the model accepts.

    Agents recognize the text and the code of this error, and shorten their conversation.

    Args:
        field: name of the prompt's field in the client's request.
        num_tokens: tokens of the prompt.
        limit: maximum number of tokens of a prompt.
    """

    code: ClassVar[str] = "context_length_exceeded"

    def __init__(self, field: str, num_tokens: int, limit: int) -> None:
        super().__init__(field, f"is too long: {num_tokens} tokens > {limit} maximum")
        self.num_tokens = num_tokens
        self.limit = limit

    def __str__(self) -> str:
        return f"prompt {self.problem}"

    def of_field(self, field: str) -> InvalidRequestError:
        return PromptTooLongError(field, self.num_tokens, self.limit)


def _shortened(text: str) -> str:
    """Leave out the middle of a long message, which may quote megabytes of a client's text."""
    if len(text) <= MAX_QUOTED_CHARS:
        return text
    return f"{text[: MAX_QUOTED_CHARS // 2]} ... {text[-MAX_QUOTED_CHARS // 2 :]}"


class PoisonRequestError(BatonError):
    """Nodes died while computing an equal request, so this request is not retried."""


class UnauthenticatedError(BatonError):
    """A call has no API key, or an unknown one."""


class PermissionDeniedError(BatonError):
    """The caller is known, but may not do this."""


class ConfigError(BatonError, ValueError):
    """A program's option, file or environment is invalid; raised only at start-up."""


class ModelLoadError(ConfigError):
    """A model folder is missing, incomplete, damaged or unsupported."""


class NotFoundError(BatonError):
    """No node or request has this name or id, or its record is gone."""


class OverloadedError(BatonError):
    """The system has no capacity for the request now; a retry may succeed."""

    retryable = True
    retry_delay_s = 1.0


class NodeUnavailableError(BatonError):
    """The router cannot be reached, or a node that the request needs."""

    retryable = True
    retry_delay_s = 0.5


class DeadlineExceededError(BatonError):
    """The request's deadline has passed."""


class RequestCancelledError(BatonError):
    """The request was cancelled by its client or by an operator."""


class TransferError(BatonError):
    """KV blocks did not reach the decode node."""

    retryable = True
    retry_delay_s = 0.5


class DamagedModelError(BatonError):
    """A model computed NaN or infinite logits; only the affected request fails."""


class EngineDeadError(BatonError):
    """A node's engine cannot continue, and the process exits."""


STATUS_OF_ERROR: dict[type[BatonError], str] = {
    InvalidRequestError: "INVALID_ARGUMENT",
    PromptTooLongError: "INVALID_ARGUMENT",
    PoisonRequestError: "FAILED_PRECONDITION",
    UnauthenticatedError: "UNAUTHENTICATED",
    PermissionDeniedError: "PERMISSION_DENIED",
    NotFoundError: "NOT_FOUND",
    OverloadedError: "RESOURCE_EXHAUSTED",
    NodeUnavailableError: "UNAVAILABLE",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    RequestCancelledError: "CANCELLED",
    TransferError: "UNAVAILABLE",
    DamagedModelError: "INTERNAL",
    EngineDeadError: "INTERNAL",
}

# gRPC status -> HTTP code, so that both APIs report the same errors.
HTTP_STATUS_OF: dict[str, int] = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 499,  # HTTP has no such code; proxies use 499 for lost clients
    "INTERNAL": 500,
}


def status_name(error: BatonError) -> str:
    """Return the gRPC status of an error's class or nearest base class in `STATUS_OF_ERROR`."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF_ERROR:
            return STATUS_OF_ERROR[kind]
    return "INTERNAL"


_REPORTED: dict[str, type[BatonError]] = {
    "UNAVAILABLE": NodeUnavailableError,
    "ADAPTER_MISSING": NodeUnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "CANCELLED": RequestCancelledError,
}


def error_of(reported: RequestError) -> BatonError:
    """Return the exception for an error from a node; an unknown code becomes EngineDeadError."""
    message = printable(reported.message)
    if reported.code == "INVALID_ARGUMENT":
        field_name, _, problem = message.partition(": ")
        return InvalidRequestError(field_name, problem)
    return _REPORTED.get(reported.code, EngineDeadError)(message)
