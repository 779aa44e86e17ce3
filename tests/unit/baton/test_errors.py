"""Unit tests of the error tree and of the one table from errors to status codes."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from baton.api.errors import (
    HTTP_STATUS_OF,
    STATUS_OF_ERROR,
    BatonError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    NodeUnavailableError,
)
from baton.serving.call_gate import status_of


def tree(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    """Yield a kind and its subclasses in the ground; programs' own errors travel by no API."""
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == BatonError.__module__:
            yield from tree(child)


# Errors that end a program before it serves have no status.
START_UP_ONLY = {BatonError, ConfigError, ModelLoadError}


@pytest.mark.parametrize("kind", list(tree(BatonError)))
def test_every_error_has_a_status_or_is_of_start_up_only(kind: type[BatonError]) -> None:
    assert (kind in STATUS_OF_ERROR) != (kind in START_UP_ONLY)


def test_every_status_in_the_table_is_one_that_grpc_knows() -> None:
    assert all(grpc.StatusCode[name].name == name for name in STATUS_OF_ERROR.values())


def test_every_status_has_its_own_of_http() -> None:
    assert set(HTTP_STATUS_OF) == set(STATUS_OF_ERROR.values())
    assert len(set(HTTP_STATUS_OF.values())) == len(HTTP_STATUS_OF)
    assert all(400 <= status < 600 for status in HTTP_STATUS_OF.values())


def test_no_status_is_used_for_a_success() -> None:
    assert "OK" not in STATUS_OF_ERROR.values()


def test_a_subclass_has_the_status_of_its_nearest_ancestor() -> None:
    class NodeDrainingError(NodeUnavailableError):
        pass

    assert status_of(NodeDrainingError("x")) is grpc.StatusCode.UNAVAILABLE


def test_what_the_table_does_not_name_is_internal() -> None:
    assert status_of(BatonError("x")) is grpc.StatusCode.INTERNAL
    assert status_of(EngineDeadError("x")) is grpc.StatusCode.INTERNAL


def test_an_invalid_request_keeps_field_and_problem_apart_and_joins_them_in_its_text() -> None:
    error = InvalidRequestError("top_p", "must be in (0, 1], got 2")
    assert (error.field, error.problem) == ("top_p", "must be in (0, 1], got 2")
    assert str(error) == "top_p: must be in (0, 1], got 2"
    assert status_of(error) is grpc.StatusCode.INVALID_ARGUMENT


def test_what_a_client_sent_is_quoted_up_to_a_limit() -> None:
    """Regression: an error quoted a wrong name of eight megabytes as a whole."""
    error = InvalidRequestError("k" * 8_000_000, "is " + "x" * 8_000_000 + ", not known")
    assert len(str(error)) < 5_000
    assert str(error).endswith(", not known")
    assert str(InvalidRequestError("n", "must be 1")) == "n: must be 1"
