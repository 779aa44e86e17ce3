"""Unit tests of error details: what a client raises is what the router raised."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.api.errors import (
    STATUS_OF_ERROR,
    BatonError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
)
from baton.serving.call_gate import status_of
from baton.serving.error_details import (
    DETAILS_KEY,
    details_trailer,
    error_from_trailers,
    reason_of,
    receipt_from_trailers,
    receipt_trailer,
)
from tests.fakes.router.nodes import make_receipt

RECEIPT = make_receipt(ttft_s=0.5, total_s=0.75, prefill=None, decode=None, router_queue_s=0.25)


def make(kind: type[BatonError]) -> BatonError:
    if kind is InvalidRequestError:
        return InvalidRequestError("top_p", "must be in [0, 1], got: 2")
    if kind is PromptTooLongError:
        return PromptTooLongError("prompt", 12, 8)
    return kind("it went: wrong")


def sent(error: BatonError) -> dict[str, str | bytes]:
    return dict([details_trailer(status_of(error).value[0], str(error), error)])


@pytest.mark.parametrize("kind", list(STATUS_OF_ERROR))
def test_every_error_that_has_a_status_comes_back_as_itself(kind: type[BatonError]) -> None:
    error = make(kind)
    found = error_from_trailers(str(error), sent(error))
    assert found is not None
    assert type(found) is kind
    assert str(found) == str(error)
    assert (found.retryable, found.retry_delay_s) == (error.retryable, error.retry_delay_s)
    assert error.retryable == (error.retry_delay_s is not None)
    if isinstance(error, InvalidRequestError):
        assert isinstance(found, InvalidRequestError)
        assert (found.field, found.problem) == (error.field, error.problem)


def test_a_delay_of_the_moment_comes_back() -> None:
    error = OverloadedError("full")
    error.retry_delay_s = 0.125
    found = error_from_trailers("full", sent(error))
    assert found is not None
    assert found.retry_delay_s == 0.125
    assert OverloadedError.retry_delay_s == 1.0


def test_any_client_can_read_the_standard_details() -> None:
    trailer = sent(make(InvalidRequestError))[DETAILS_KEY]
    assert isinstance(trailer, bytes)
    status = status_pb2.Status.FromString(trailer)
    info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(violations)
    assert (info.domain, info.reason) == ("baton", "INVALID_REQUEST")
    assert info.metadata["retryable"] == "false"
    assert violations.field_violations[0].field == "top_p"


def test_a_subclass_is_known_by_its_nearest_ancestor_and_the_rest_is_internal() -> None:
    class QuotaError(OverloadedError):
        pass

    assert reason_of(QuotaError("x")) == "OVERLOADED"
    assert reason_of(BatonError("x")) == "INTERNAL"


@pytest.mark.parametrize("trailer", [b"\xff\xff", b"", "a text"])
def test_trailers_that_are_not_ours_say_nothing(trailer: str | bytes) -> None:
    assert error_from_trailers("x", {DETAILS_KEY: trailer}) is None
    assert receipt_from_trailers({"baton-receipt-bin": "a text"}) is None
    assert error_from_trailers("x", {}) is None


def test_the_receipt_comes_back_with_the_error() -> None:
    error = make(OverloadedError)
    found = error_from_trailers("x", sent(error) | dict([receipt_trailer(RECEIPT)]))
    assert found is not None
    assert found.receipt == RECEIPT
    assert RECEIPT.network_s == 0.25
