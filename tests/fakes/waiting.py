"""Waiting for another thread: polls with a deadline, and says what did not happen."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 10.0
_POLL_S = 0.001


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as ``condition()`` is true; fail after ``TIMEOUT_S``."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not come true in {TIMEOUT_S:g} s"
        time.sleep(_POLL_S)
