"""Errors as Anthropic's API words them, on the paths of its messages.

{"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: ..."},
 "request_id": "..."}
"""

from __future__ import annotations

import msgspec
from aiohttp import web

MESSAGES_PATH = "/v1/messages"
REQUEST_ID_HEADER = "request-id"  # where its clients look for it
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageError(msgspec.Struct):
    type: str
    message: str


class MessageErrorBody(msgspec.Struct):
    error: MessageError
    request_id: str | None
    type: str = "error"


def is_of_messages(request: web.BaseRequest) -> bool:
    """Whether a client of this API waits for the answer, or the error."""
    return request.path == MESSAGES_PATH or request.path.startswith(f"{MESSAGES_PATH}/")


def message_error(status: int, message: str) -> MessageError:
    """An error with an HTTP status, in this API's words."""
    otherwise = "invalid_request_error" if status < 500 else "api_error"
    return MessageError(_TYPES.get(status, otherwise), message)
