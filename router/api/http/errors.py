"""Convert errors to HTTP: a status, and a body in the format of the path's API.

OpenAI's:
    {"error": {"message": "max_tokens: must be 1 or more, got 0", "type": "invalid_request_error",
               "param": "max_tokens", "code": null}}
Anthropic's, on the paths of its messages:
    {"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: ..."},
     "request_id": "..."}

Status codes of `BatonError` are in the table of `baton/api/errors.py`.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import hdrs, web

from baton.api.errors import (
    HTTP_STATUS_OF,
    BatonError,
    InvalidRequestError,
    PromptTooLongError,
    UnauthenticatedError,
    status_name,
)
from baton.api.printable import printable

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

REQUEST_ID = web.RequestKey("request_id", str)
logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

# Error codes by which clients decide to retry later, to ask for a key, or to give up.
_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    429: "rate_limit_exceeded",
    503: "server_is_overloaded",
}

MESSAGES_PATH = "/v1/messages"
# Header in which Anthropic's client libraries look for the request id.
MESSAGES_REQUEST_ID_HEADER = "request-id"
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that exists only in HTTP, such as an unknown path.

    Args:
        status: HTTP status code.
        code: OpenAI's error code, if there is one.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct):
    error: _Error


class MessageError(msgspec.Struct):
    type: str
    message: str


class MessageErrorBody(msgspec.Struct):
    error: MessageError
    request_id: str | None
    type: str = "error"


def is_of_messages(request: web.BaseRequest) -> bool:
    """Return whether a request is for Anthropic's API, by its path."""
    return request.path == MESSAGES_PATH or request.path.startswith(f"{MESSAGES_PATH}/")


def error_message(error: BatonError | ApiError) -> str:
    """Return an error's message as one printable line that can be written as JSON.

    A message may quote a header whose bytes are not UTF-8. aiohttp turns these bytes into
    surrogates, which no JSON encoder writes.
    """
    return printable(str(error))


def message_error(error: BatonError | ApiError) -> MessageError:
    """Return an error's object in the form of Anthropic's API."""
    status = status_of(error)
    otherwise = "invalid_request_error" if status < 500 else "api_error"
    return MessageError(_MESSAGE_TYPES.get(status, otherwise), error_message(error))


def status_of(error: BatonError | ApiError) -> int:
    """Return the HTTP status code of an error."""
    return error.status if isinstance(error, ApiError) else HTTP_STATUS_OF[status_name(error)]


def error_code(error: BatonError | ApiError) -> str | None:
    """Return OpenAI's code for an error, or None."""
    if isinstance(error, ApiError) and error.code is not None:
        return error.code
    if isinstance(error, PromptTooLongError):
        return error.code
    return _CODES.get(status_of(error))


def error_body(error: BatonError | ApiError) -> bytes:
    """Return an error in the JSON form of OpenAI's API."""
    param = None
    if isinstance(error, ApiError):
        param = error.param
    elif isinstance(error, InvalidRequestError):
        param = error.field
    kind = _TYPES.get(status_of(error), "internal_error")
    body = _Error(error_message(error), kind, param, error_code(error))
    return msgspec.json.encode(_ErrorBody(body))


def error_response(request: web.BaseRequest, error: BatonError | ApiError) -> web.Response:
    """Return the response to a request that failed before anything was sent."""
    status = status_of(error)
    body = error_body(error)
    if is_of_messages(request):
        body = msgspec.json.encode(MessageErrorBody(message_error(error), request.get(REQUEST_ID)))
    headers = {}
    delay_s = None if isinstance(error, ApiError) else error.retry_delay_s
    if delay_s is not None:
        # The header Retry-After allows only whole seconds
        headers[hdrs.RETRY_AFTER] = str(math.ceil(delay_s))
    if isinstance(error, UnauthenticatedError):
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def known_error(error: Exception) -> BatonError | ApiError:
    """Return the error to show to the client; log an unexpected error and hide its text."""
    if isinstance(error, BatonError | ApiError):
        return error
    logger.error("unexpected error in a request", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> Any:
    """Turn errors of handlers into responses; unexpected errors become status 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(request, _of_http(request, error))
    except ConnectionError:  # the client has disconnected, so no response can be sent
        return web.Response(status=HTTP_STATUS_OF["CANCELLED"])
    except Exception as error:  # the only place in the HTTP API that catches every exception
        return error_response(request, known_error(error))


def _advice_for(path: str) -> str:
    """Return advice for a client whose base URL looks wrong; empty if the path gives no hint."""
    if path.startswith("/v1/v1/"):
        return "; /v1 stands twice, the client adds one to its base URL"
    if path.startswith("/v1/"):
        return ""
    return "; the API is below /v1, as in the base URL http://HOST:PORT/v1"


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """Convert errors that aiohttp raises: unknown path, wrong method, body too large."""
    if isinstance(error, web.HTTPNotFound):
        problem = f"path: {request.path} does not exist{_advice_for(request.path)}"
        return ApiError(404, problem, code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods - {hdrs.METH_HEAD}))
        return ApiError(405, f"method: {request.path} takes {allowed}, got {request.method}")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"body: {' '.join((error.text or 'is too large').split())}")
    return ApiError(error.status, error.reason)
