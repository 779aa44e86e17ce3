"""Writes the stacks of a process's threads and tasks to standard error at SIGUSR2.

The threads' stacks are written even if the event loop is blocked. The event loop itself writes the
tasks' stacks. Nobody can send the signal over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

DUMP_SIGNAL = signal.SIGUSR2
MOST_PLACES = 100  # maximum number of different stacks of tasks to write
_MOST_FRAMES = 40


def dump_stacks_at_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Write all stacks at each `DUMP_SIGNAL` from now on, if standard error is open."""
    with contextlib.suppress(RuntimeError, OSError, ValueError, AttributeError):
        loop.add_signal_handler(DUMP_SIGNAL, _write_tasks)
        faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True, chain=True)


def dump_threads_at_signal() -> None:
    """Write the threads' stacks at each `DUMP_SIGNAL`, in a process without an event loop."""
    with contextlib.suppress(RuntimeError, OSError, ValueError, AttributeError):
        faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True)


def _write_tasks() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in describe_tasks(asyncio.all_tasks())))
        sys.stderr.flush()


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> Iterator[str]:
    """Yield lines that say where tasks wait; tasks that wait at the same place are counted."""
    tasks = list(tasks)
    places = Counter(tuple(_frames(task.get_coro())) for task in tasks)
    yield f"{len(tasks)} tasks, at {len(places)} places"
    for frames, count in places.most_common(MOST_PLACES):
        yield f"tasks: {count}"
        yield from (f"  {frame}" for frame in frames)


def _frames(awaited: object) -> Iterator[str]:
    """Yield file, line and function of a coroutine, and of what it awaits, outermost first."""
    for _ in range(_MOST_FRAMES):
        frame = _first_attribute(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            if awaited is not None:
                yield type(awaited).__qualname__
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        awaited = _first_attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")


def _first_attribute(owner: object, *names: str) -> Any:
    """Return the first of these attributes that an object has, or None."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
