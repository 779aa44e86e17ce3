"""EarlyTemplate: a worker template that is forked from its program before threads start.

It shares the memory of what is loaded by then and imports nothing again. Later templates are new
processes (`worker_processes`), because a fork of a program with threads inherits locks that nobody
releases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.processes.child_processes import use_one_heap
from baton.processes.worker_template import Work, serve_parent

# Environment of templates, also of those that are new processes.
ENVIRONMENT = {
    # Threads of libraries are lost in a fork, and then awaited for ever.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # Address space is limited: all threads share one heap.
    "MALLOC_ARENA_MAX": "1",
}
_MAX_DESCRIPTORS = 2**16  # more than a program has opened when it forks


class ForkedProcess:
    """A forked child of this process, with methods like `subprocess.Popen`.

    Attributes:
        pid: process id.
        returncode: exit code; None while the process runs; negative if a signal ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        returncode = self._wait(0)
        assert returncode is not None
        return returncode

    def kill(self) -> None:
        """Kill it, unless it has ended."""
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
        control: socket on which `worker_processes` sends it commands.
    """

    process: ForkedProcess
    control: socket.socket


def may_fork() -> bool:
    """Return whether this process has only one thread, so that it may be forked."""
    return threading.active_count() == 1


def fork_template(make_work: Callable[[], Work]) -> EarlyTemplate:
    """Fork a template; call only if `may_fork`.

    Args:
        make_work: called in the template; returns the function that does the work.

    Raises:
        OSError: forking failed.
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
    """Act as a template until the parent is gone; never returns."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the program, which still has requests to finish
        os.environ.update(ENVIRONMENT)
        use_one_heap()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        kept = control.fileno()  # all others are the program's, such as its end of the socket
        os.closerange(3, kept)
        os.closerange(kept + 1, _MAX_DESCRIPTORS)
        work = make_work()
        serve_parent(control, lambda _: work)
        code = 0
    finally:
        os._exit(code)
