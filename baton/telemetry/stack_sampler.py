"""Stack sampler: finds out where a running thread spends its time.

Every few milliseconds, the sampler reads the Python stack of the thread, which costs little. The
sampler does not see C code: time in C code counts for the Python function that called the C code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import CodeType, FrameType

from baton.api.errors import InvalidRequestError

INTERVAL_S = 0.005
MAX_SECONDS = 60.0
NUM_FUNCTIONS = 40


@dataclass(frozen=True, slots=True)
class SampledFunction:
    """A function, and the number of samples in which it was on the stack.

    Attributes:
        place: ``file:line`` of the function's first line, with the last two parts of the path.
        num_own: number of samples in which the thread was in the function itself.
        num_total: number of samples in which the thread was in the function or in functions that it
            called.
    """

    name: str
    place: str
    num_own: int
    num_total: int


@dataclass(frozen=True, slots=True)
class StackProfile:
    """Samples of a thread's stack: the functions on the stack, the most frequent first."""

    thread: str
    num_samples: int
    seconds: float
    functions: list[SampledFunction]


def sample_stacks(thread_name: str, seconds: float) -> StackProfile:
    """Sample the stack of a thread for some seconds; block only the calling thread.

    Raises:
        InvalidRequestError: there is no thread of this name, or the time is out of range.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequestError(
            "seconds", f"must be above 0 and at most {MAX_SECONDS:g}, got {seconds:g}"
        )
    thread = next((one for one in threading.enumerate() if one.name == thread_name), None)
    if thread is None or thread.ident is None:
        raise InvalidRequestError("thread", f"there is no thread {thread_name!r}")
    own: Counter[CodeType] = Counter()
    total: Counter[CodeType] = Counter()
    num_samples, began_at = 0, time.monotonic()
    while (now := time.monotonic()) < began_at + seconds:
        frame = sys._current_frames().get(thread.ident)
        if frame is None:
            break  # the thread has ended
        num_samples += 1
        own[frame.f_code] += 1
        total.update(_codes(frame))
        time.sleep(max(began_at + num_samples * INTERVAL_S - now, 0.0))
    order = sorted(total, key=lambda code: (-own[code], -total[code]))
    functions = [
        SampledFunction(code.co_qualname, _place(code), own[code], total[code])
        for code in order[:NUM_FUNCTIONS]
    ]
    return StackProfile(thread_name, num_samples, time.monotonic() - began_at, functions)


def _codes(frame: FrameType | None) -> set[CodeType]:
    """Return the code objects of the functions on a stack, each once."""
    codes = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return codes


def _place(code: CodeType) -> str:
    return "/".join(code.co_filename.split("/")[-2:]) + f":{code.co_firstlineno}"
