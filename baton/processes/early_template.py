"""EarlyTemplate: a worker template that is forked from its program before threads start.

A worker template is a process that forks workers. A forked template shares the memory of the
program and need not import modules again. After threads have started, a template must be a new
process (`worker_processes`), because a fork would inherit locks that no thread will release.
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

# Environment variables of all templates, forked or new.
ENVIRONMENT = {
    # Switch off thread pools: a fork loses the threads of libraries, which would then wait for them
    # for ever.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # All threads share one heap, because the address space of workers is limited.
    "MALLOC_ARENA_MAX": "1",
}
# Descriptors up to this number are closed: more than a program has open when it forks.
_MAX_DESCRIPTORS = 2**16


class ForkedProcess:
    """A forked child of this process, with the methods of `subprocess.Popen` that are used.

    Attributes:
        pid: process id.
        returncode: exit code; None while the process runs; negative if a signal ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process to end, and return its exit code."""
        returncode = self._wait(0)
        assert returncode is not None
        return returncode

    def kill(self) -> None:
        """Kill the process unless it has ended."""
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
    """A forked worker template, as its parent sees it.

    Attributes:
        control: socket on which `worker_processes` sends commands to the template.
    """

    process: ForkedProcess
    control: socket.socket


def may_fork() -> bool:
    """Return whether this process may be forked, because it has only one thread."""
    return threading.active_count() == 1


def fork_template(make_work: Callable[[], Work]) -> EarlyTemplate:
    """Fork a worker template; call this only if `may_fork` returns True.

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
    """Act as a worker template until the parent is gone; never return."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the program, which may have requests to finish
        os.environ.update(ENVIRONMENT)
        use_one_heap()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        # The template keeps only this descriptor, because the others belong to the program.
        kept = control.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, _MAX_DESCRIPTORS)
        work = make_work()
        serve_parent(control, lambda _: work)
        code = 0
    finally:
        os._exit(code)
