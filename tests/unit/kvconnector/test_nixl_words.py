"""Unit tests of NIXL's errors as text: an unclear code says where its reason is logged."""

from __future__ import annotations

import pytest

from kvconnector.transports.nixl.agent import _error_text


@pytest.mark.parametrize(
    ("code", "has_advice"),
    [("NIXL_ERR_BACKEND", True), ("NIXL_ERR_REMOTE_DISCONNECT", False)],
)
def test_a_failure_of_the_backend_names_the_log_that_has_the_reason(
    code: str, has_advice: bool
) -> None:
    """Regression: `baton admin nodes` said "not paired: ... NIXL_ERR_BACKEND", and no more."""
    words = _error_text(RuntimeError(code))
    assert words.startswith(code)
    assert ("UCX's lines in this node's log say why" in words) is has_advice
