"""EarlyTemplate: a worker template that is forked from its program, before the program has threads.

It shares the memory of what the program has loaded by then, and imports nothing again. A template
that starts later is a new process (`worker_processes`): a fork of a program with threads inherits
their locks and nobody to release them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.processes.worker_template import Work, serve_parent

# What `worker_processes` gives a template that is a new process.
ENVIRONMENT = {
    # Threads that a library starts are lost in a fork, and waited for for ever.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Address space is counted: one heap for all threads.
    "MALLOC_ARENA_MAX": "1",
}
_M_ARENA_MAX = -8  # of mallopt(3)
_MAX_DESCRIPTORS = 2**16  # a program has opened few before it begins


class ForkedProcess:
    """A child of this process; see `subprocess.Popen` for the methods.

    Attributes:
        pid: process id of the child.
        returncode: None while it runs; below 0 if a signal ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        returncode = self._wait(0)
        assert returncode is not None
        return returncode

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


@dataclass(frozen=True, slots=True)
class EarlyTemplate:
    """A forked template.

    Attributes:
        control: what `worker_processes` tells it everything by.
    """

    process: ForkedProcess
    control: socket.socket


def may_fork() -> bool:
    """Return whether this process has one thread, so that it may be forked."""
    return threading.active_count() == 1


def fork_template(make_work: Callable[[], Work]) -> EarlyTemplate:
    """Fork a template; call this only if `may_fork`.

    Args:
        make_work: called in the template; returns the function that does the work.

    Raises:
        OSError: a resource is missing.
    """
    assert may_fork(), "threads have begun"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process_id = os.fork()
        except OSError:
            ours.close()
            raise
        if process_id == 0:
            _be_template(theirs, make_work)
    return EarlyTemplate(ForkedProcess(process_id), ours)


def _be_template(control: socket.socket, make_work: Callable[[], Work]) -> None:
    """Be a template until the parent is gone; never returns."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the program, which still has requests to end
        os.environ.update(ENVIRONMENT)
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        kept = control.fileno()  # all else is the program's, such as our end of the socket
        os.closerange(3, kept)
        os.closerange(kept + 1, _MAX_DESCRIPTORS)
        work = make_work()
        serve_parent(control, lambda _: work)
        code = 0
    finally:
        os._exit(code)
