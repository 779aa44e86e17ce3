"""Errors: the one exception tree, and the one table from it to gRPC's and HTTP's status codes.

    BatonError
    ├── InvalidRequestError     a request's field is outside its limit          INVALID_ARGUMENT
    │   └── PromptTooLongError  a prompt has more tokens than the model takes    INVALID_ARGUMENT
    ├── PoisonRequestError      nodes died of a request like it                  FAILED_PRECONDITION
    ├── UnauthenticatedError    a call brings no key that is known              UNAUTHENTICATED
    ├── PermissionDeniedError   the caller is known and may not do this          PERMISSION_DENIED
    ├── ConfigError             a program's option or file is wrong              (start-up only)
    │   └── ModelLoadError      a model folder is missing, broken or unsupported
    ├── NotFoundError           no node or request of that name                  NOT_FOUND
    ├── OverloadedError         no room now; try again later                     RESOURCE_EXHAUSTED
    ├── NodeUnavailableError    a node or the router is not there                UNAVAILABLE
    ├── DeadlineExceededError   an absolute deadline passed                      DEADLINE_EXCEEDED
    ├── RequestCancelledError   the client or an operator ended it               CANCELLED
    ├── TransferError           KV blocks did not arrive                         UNAVAILABLE
    ├── DamagedModelError       a model computes NaN or infinite logits          INTERNAL
    └── EngineDeadError         the engine of a node cannot continue             INTERNAL

Status codes are named by string so that this file needs no gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from baton.api.outputs import Receipt


MAX_QUOTED_CHARS = 2_000


class BatonError(Exception):
    """Base of every error that Baton raises on purpose.

    Attributes:
        retryable: whether the same request may succeed later.
        retry_delay_s: how long to wait before; None when it is not retryable.
        receipt: what the request had cost when it failed, as far as it is known.
    """

    retryable: ClassVar[bool] = False
    retry_delay_s: float | None = None
    receipt: Receipt | None = None


class InvalidRequestError(BatonError, ValueError):
    """A request's field is outside its limit; the message names both.

    Args:
        field: the field as the user wrote it, for example ``max_tokens``.
        problem: the fault and the limit, in one line.
    """

    def __init__(self, field: str, problem: str) -> None:
        field, problem = _shortened(field), _shortened(problem)
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def of_field(self, field: str) -> InvalidRequestError:
        """Return the same error about a field that the client calls otherwise."""
        return InvalidRequestError(field, self.problem)


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than the model takes.

    Agents know these words, and the code, and make their conversation shorter.

    Args:
        field: what the user calls the prompt.
        num_tokens: tokens of the prompt.
        limit: most tokens of a prompt.
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
    """Shorten a line that may quote megabytes of a client's text to its beginning and end."""
    if len(text) <= MAX_QUOTED_CHARS:
        return text
    return f"{text[: MAX_QUOTED_CHARS // 2]} ... {text[-MAX_QUOTED_CHARS // 2 :]}"


class PoisonRequestError(BatonError):
    """The request, or one like it, killed the nodes that computed it; it is not tried again."""


class UnauthenticatedError(BatonError):
    """A call brings no API key, or none that the router knows."""


class PermissionDeniedError(BatonError):
    """The caller is known, but may not do this."""


class ConfigError(BatonError, ValueError):
    """A program's option, file or environment is wrong; raised at start-up only."""


class ModelLoadError(ConfigError):
    """A model folder is missing, incomplete, broken or of an unsupported kind."""


class NotFoundError(BatonError):
    """There is no node or request of that name, or it is forgotten."""


class OverloadedError(BatonError):
    """There is no room for the request now; the same request may succeed later."""

    retryable = True
    retry_delay_s = 1.0


class NodeUnavailableError(BatonError):
    """A node (or the router) that the request needs is not there."""

    retryable = True
    retry_delay_s = 0.5


class DeadlineExceededError(BatonError):
    """The request's absolute deadline passed."""


class RequestCancelledError(BatonError):
    """The request was cancelled by its client or by an operator."""


class TransferError(BatonError):
    """KV blocks did not arrive at the decode node."""

    retryable = True
    retry_delay_s = 0.5


class DamagedModelError(BatonError):
    """A model computed NaN or infinite logits; only the request that has them ends."""


class EngineDeadError(BatonError):
    """The engine of a node cannot continue; the process is about to exit."""


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

# By gRPC's status, so that both APIs always say the same of an error.
HTTP_STATUS_OF: dict[str, int] = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 499,  # nobody's standard, but what proxies say of a request that was given up
    "INTERNAL": 500,
}


def status_name(error: BatonError) -> str:
    """Return the name of an error's gRPC status; the nearest class in the table counts."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF_ERROR:
            return STATUS_OF_ERROR[kind]
    return "INTERNAL"
