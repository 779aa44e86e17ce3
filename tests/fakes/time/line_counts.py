"""Counts executed lines: a measure of work that does not depend on the machine's speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(function: Callable[[], object]) -> int:
    """Call ``function``; return how many lines of Python it executed, loops counted each time."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        del frame, argument
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines
