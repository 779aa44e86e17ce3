"""Waiting for another thread: polls with a deadline, and says what did not happen."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 10.0
_POLL_S = 0.001


def wait_until(
    condition: Callable[[], object], what: str = "the condition", *, timeout_s: float = TIMEOUT_S
) -> None:
    """Return as soon as ``condition()`` is true; fail after ``timeout_s``."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not come true in {timeout_s:g} s"
        time.sleep(_POLL_S)
