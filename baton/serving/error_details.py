"""Error details: send an error and its receipt in a call's trailers, as messages of google.rpc.

Errors are converted to trailers and back, so a client raises the error that the router raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from baton.api.errors import (
    BatonError,
    DamagedModelError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NodeUnavailableError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    PoisonRequestError,
    PromptTooLongError,
    RequestCancelledError,
    TransferError,
    UnauthenticatedError,
)
from baton.api.outputs import Receipt
from baton.v1 import types_pb2
from baton.wire import types as wire_types

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"  # trailer in which gRPC's libraries expect details
RECEIPT_KEY = "baton-receipt-bin"

_KINDS: dict[str, type[BatonError]] = {
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "NOT_FOUND": NotFoundError,
    "POISON_REQUEST": PoisonRequestError,
    "OVERLOADED": OverloadedError,
    "NODE_UNAVAILABLE": NodeUnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "REQUEST_CANCELLED": RequestCancelledError,
    "TRANSFER_FAILED": TransferError,
    "DAMAGED_MODEL": DamagedModelError,
    "ENGINE_DEAD": EngineDeadError,
}
_INVALID_REQUEST = "INVALID_REQUEST"
_MAX_DIGITS = 40  # maximum number of digits of numbers in untrusted metadata
_REASONS = {kind: reason for reason, kind in _KINDS.items()} | {
    InvalidRequestError: _INVALID_REQUEST
}


def reason_of(error: BatonError) -> str:
    """Return the name of an error's class for clients in any language."""
    for kind in type(error).__mro__:
        if kind in _REASONS:
            return _REASONS[kind]
    return "INTERNAL"


def details_trailer(code: int, message: str, error: BatonError) -> tuple[str, bytes]:
    """Return the trailer of an error: ErrorInfo, and RetryInfo or BadRequest if they apply."""
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)
    info.metadata["retryable"] = str(error.retryable).lower()
    if isinstance(error, PromptTooLongError):
        info.metadata["code"] = error.code
        info.metadata["num_tokens"] = str(error.num_tokens)
        info.metadata["limit"] = str(error.limit)
    status.details.add().Pack(info)
    if error.retry_delay_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.problem
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return DETAILS_KEY, status.SerializeToString()


def _too_long(field: str, metadata: Mapping[str, str]) -> PromptTooLongError | None:
    """Return the PromptTooLongError that the metadata of ErrorInfo describe, or None."""
    num_tokens, limit = metadata.get("num_tokens", ""), metadata.get("limit", "")
    if metadata.get("code") != PromptTooLongError.code or len(num_tokens + limit) > _MAX_DIGITS:
        return None
    if not (num_tokens.isdecimal() and limit.isdecimal()):
        return None
    return PromptTooLongError(field, int(num_tokens), int(limit))


def receipt_trailer(receipt: Receipt) -> tuple[str, bytes]:
    return RECEIPT_KEY, wire_types.receipt_to_proto(receipt).SerializeToString()


def receipt_from_trailers(trailers: Mapping[str, str | bytes]) -> Receipt | None:
    """Return the receipt, or None if it is missing or unreadable."""
    value = trailers.get(RECEIPT_KEY)
    if not isinstance(value, bytes):
        return None
    try:
        return wire_types.receipt_from_proto(types_pb2.Receipt.FromString(value))
    except DecodeError:
        return None


def error_from_trailers(message: str, trailers: Mapping[str, str | bytes]) -> BatonError | None:
    """Return the error that the other side raised, or None if the trailers name none."""
    details = list(_unpack(trailers.get(DETAILS_KEY)))
    infos = [one for one in details if isinstance(one, error_details_pb2.ErrorInfo)]
    if not infos or infos[0].domain != DOMAIN:
        return None
    error: BatonError
    if infos[0].reason == _INVALID_REQUEST:
        field, _, problem = message.partition(": ")
        for one in details:
            if isinstance(one, error_details_pb2.BadRequest) and one.field_violations:
                violation = one.field_violations[0]
                field, problem = violation.field, violation.description
        error = _too_long(field, infos[0].metadata) or InvalidRequestError(field, problem)
    else:
        error = _KINDS.get(infos[0].reason, BatonError)(message)
    for one in details:
        if isinstance(one, error_details_pb2.RetryInfo):
            error.retry_delay_s = one.retry_delay.ToNanoseconds() / 1e9
    error.receipt = receipt_from_trailers(trailers)
    return error


def _unpack(value: str | bytes | None) -> Iterable[object]:
    if not isinstance(value, bytes):
        return
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.RetryInfo,
        error_details_pb2.BadRequest,
    )
    try:
        for packed in status_pb2.Status.FromString(value).details:
            for kind in kinds:
                if packed.Is(kind.DESCRIPTOR):
                    one = kind()
                    packed.Unpack(one)
                    yield one
    except DecodeError:
        return
