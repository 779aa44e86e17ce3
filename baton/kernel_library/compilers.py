"""Compilers: runs compiler processes that end when this process ends, even if it is killed.

A compiler starts processes of its own (cc1, as), which a signal to the compiler does not reach. So
all these processes are in one process group with a guard process. The guard reads from a pipe that
only this process holds open, and kills the group when the pipe closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_GUARD = ("/bin/sh", "-c", "read line; kill -KILL 0")
_TOOL_TIMEOUT_S = 60.0


class BuildError(Exception):
    """The library cannot be built or used; the message says why, in one line."""


class Compilers:
    """Context in which compilers run; those that still run at its end are killed.

    Args:
        deadline: time by which all commands must have ended, by `time.monotonic`.

    Attributes:
        group: id of the compilers' process group.

    Raises:
        BuildError: the shell for the guard is missing.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        try:
            self._guard = subprocess.Popen(_GUARD, stdin=subprocess.PIPE, process_group=0)
        except OSError as error:
            raise BuildError(f"{_GUARD[0]}: {error.strerror or error}") from error
        self.group = self._guard.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The guard leads the group and has not been reaped yet, so no other group can have its
        # number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._guard.communicate()

    def run(self, command: Sequence[str]) -> str:
        """Run a compiler and return its output; thread-safe.

        Raises BuildError with the first line of the compiler's error output.
        """
        return run_tool(command, self._deadline - time.monotonic(), group=self.group)


def run_tool(
    command: Sequence[str], timeout_s: float = _TOOL_TIMEOUT_S, group: int | None = None
) -> str:
    """Run a command and return its output; raises BuildError with its first line of errors.

    Args:
        group: process group that the command joins; None: this process's group.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, timeout_s),
            process_group=group,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]}: took longer than its time limit") from error
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror or error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        shown = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]}: {shown}")
    return done.stdout
