"""Errors: the one exception tree, and the one table that maps it to gRPC status codes.

    BatonError
    ├── InvalidRequestError     a request's field is outside its limit          INVALID_ARGUMENT
    ├── ConfigError             a program's option or file is wrong              (start-up only)
    │   └── ModelLoadError      a model folder is missing, broken or unsupported
    ├── NotFoundError           no node or request of that name                  NOT_FOUND
    ├── OverloadedError         no room now; try again later                     RESOURCE_EXHAUSTED
    ├── NodeUnavailableError    a node or the router is not there                UNAVAILABLE
    ├── DeadlineExceededError   an absolute deadline passed                      DEADLINE_EXCEEDED
    ├── RequestCancelledError   the client or an operator ended it               CANCELLED
    ├── TransferError           KV blocks did not arrive                         UNAVAILABLE
    └── EngineDeadError         the engine of a node cannot continue             INTERNAL

Status codes are named by string so that this file needs no gRPC.
"""

from __future__ import annotations


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""


class InvalidRequestError(BatonError, ValueError):
    """A request's field is outside its limit; the message names both.

    Args:
        field: the field as the user wrote it, for example ``max_tokens``.
        problem: what is wrong and what the limit is, one line.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigError(BatonError, ValueError):
    """A program's option, file or environment is wrong; raised at start-up only."""


class ModelLoadError(ConfigError):
    """A model folder is missing, incomplete, broken or of an unsupported kind."""


class NotFoundError(BatonError):
    """There is no node or request of that name, or it is forgotten."""


class OverloadedError(BatonError):
    """There is no room for the request now; the same request may succeed later."""


class NodeUnavailableError(BatonError):
    """A node (or the router) that the request needs is not there."""


class DeadlineExceededError(BatonError):
    """The request's absolute deadline passed."""


class RequestCancelledError(BatonError):
    """The request was cancelled by its client or by an operator."""


class TransferError(BatonError):
    """KV blocks did not arrive at the decode node."""


class EngineDeadError(BatonError):
    """The engine of a node cannot continue; the process is about to exit."""


STATUS_OF_ERROR: dict[type[BatonError], str] = {
    InvalidRequestError: "INVALID_ARGUMENT",
    NotFoundError: "NOT_FOUND",
    OverloadedError: "RESOURCE_EXHAUSTED",
    NodeUnavailableError: "UNAVAILABLE",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    RequestCancelledError: "CANCELLED",
    TransferError: "UNAVAILABLE",
    EngineDeadError: "INTERNAL",
}
