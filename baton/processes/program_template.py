"""ProgramTemplate: a process that imports the modules of programs once, and forks the programs.

The forked programs share the memory of the imported code; otherwise each would import torch, which
takes a second and 130 MiB. The template has only one thread, so a fork never inherits a lock that
is held. Works on Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from baton.processes.child_processes import PYTHON_MODULE

# Bytes to reserve in the template's command line, in which a forked program writes its own command
# line for `ps`.
_TITLE_ROOM = " " * 4096
_MAX_MESSAGE = 2**20
_POLL_S = 0.05
# Exit code to report for a program whose template has ended, because only the template knew the
# real one.
_UNKNOWN = -signal.SIGKILL
_ARG_START = 45  # index of arg_start in /proc/self/stat, after the name
_REAPER = Path(__file__).with_name("program_reaper.py")


class TemplateError(Exception):
    """The template cannot fork a program, so the caller must start the program in another way."""


class _Start(msgspec.Struct, frozen=True, tag="start"):
    """Command to fork a program; its message carries the descriptor of the program's output."""

    arguments: list[str]
    environment: dict[str, str]


class _Release(msgspec.Struct, frozen=True, tag="release"):
    """Command to free the template's memory, after which it forks no more programs."""


class _Event(msgspec.Struct, frozen=True):
    """Message from the template that a program has started or ended.

    Attributes:
        returncode: exit code; None: the program has started; negative: a signal ended it.
    """

    pid: int
    returncode: int | None = None


_COMMAND = msgspec.json.Decoder(_Start | _Release)
_EVENT = msgspec.json.Decoder(_Event)


class ProgramTemplate:
    """The program template, as its parent process sees it.

    Args:
        function: ``"module:function"`` to call in each program, with `sys.argv` set.
        modules: modules to import before the first fork.
        environment: environment variables of the template, which libraries read at their import.
        kept: descriptors that forked programs inherit under the same numbers.
        load: ``"module:function"`` to call once before the first fork, and its arguments; empty: no
            call.
    """

    def __init__(
        self,
        function: str,
        modules: Sequence[str],
        environment: Mapping[str, str],
        kept: Sequence[int] = (),
        load: Sequence[str] = (),
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._returncodes: dict[int, int] = {}
        self._has_ended = self._has_released = False
        module = "baton.processes.program_template"
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(*PYTHON_MODULE, module, str(theirs.fileno()), function),
                    *(" ".join(modules), msgspec.json.encode(load).decode(), _TITLE_ROOM),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=(theirs.fileno(), *kept),
                start_new_session=True,
            )

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> ForkedProgram:
        """Fork a program; waits until the template has imported its modules.

        Args:
            arguments: words after the program's name.
            environment: all environment variables of the program.
            output: descriptor for the program's standard output and standard error.

        Raises:
            TemplateError: the template has ended, or released its memory.
        """
        if self._has_released:
            raise TemplateError("the template has released its memory")
        message = msgspec.json.encode(_Start(list(arguments), dict(environment)))
        with self._lock:
            try:
                socket.send_fds(self._control, [message], [output])
            except OSError as error:
                raise TemplateError(f"the template has ended: {error}") from error
            while (event := self._receive()) is not None:
                if event.returncode is None:
                    return ForkedProgram(self, event.pid)
            raise TemplateError("the template has ended")

    def release_memory(self) -> None:
        """Free the template's memory once all programs have started.

        While the template exists, each page of memory that a program has changed exists twice.
        Afterwards the template only reports how programs end, and `start` raises TemplateError.
        """
        # if the template has ended, its memory is free
        with self._lock, contextlib.suppress(OSError):
            if not self._has_released:
                self._has_released = True
                self._control.send(msgspec.json.encode(_Release()))

    def returncode_of(self, pid: int, timeout_s: float | None = 0.0) -> int | None:
        """Return how a program ended, or None if it still runs after the timeout.

        Args:
            timeout_s: maximum number of seconds to wait; None: no limit.
        """
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, give_up_at - time.monotonic())
            with self._lock:
                if pid in self._returncodes:
                    return self._returncodes[pid]
                if self._has_ended and not Path(f"/proc/{pid}").exists():
                    return _UNKNOWN
                is_told = self._waits(min(left_s, _POLL_S)) and self._receive() is not None
            if not is_told and left_s == 0.0:
                return None

    def close(self) -> None:
        """End the template; the programs that it forked continue."""
        with self._lock:
            self._has_ended = True
            self._control.close()
        self._process.kill()
        self._process.wait()

    def _waits(self, timeout_s: float) -> bool:
        """Wait for an event or the timeout; return whether there may be an event."""
        if self._has_ended:
            time.sleep(timeout_s)
            return False
        return bool(select.select([self._control], [], [], timeout_s)[0])

    def _receive(self) -> _Event | None:
        """Return the next event, or None if the template has ended."""
        try:
            message = self._control.recv(_MAX_MESSAGE)
        except OSError:
            message = b""
        if not message:
            self._has_ended = True
            return None
        event = _EVENT.decode(message)
        if event.returncode is not None:
            self._returncodes[event.pid] = event.returncode
        return event


class ForkedProgram:
    """A program that a template forked, with the methods of `subprocess.Popen` that Baton uses.

    Attributes:
        pid: process id.
        returncode: exit code; None while the program runs; negative if a signal ended it.
    """

    def __init__(self, template: ProgramTemplate, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            self.returncode = self._template.returncode_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program to end; return its exit code or raise subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = self._template.returncode_of(self.pid, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Send a signal to the program unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program unless it has ended."""
        self.send_signal(signal.SIGKILL)


# ------------------------------------------------------------------ in the template


def main() -> None:
    """Run ``python -m baton.processes.program_template DESCRIPTOR FUNCTION MODULES LOAD ROOM``."""
    descriptor, function, modules, load, _ = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    for name in modules.split():
        importlib.import_module(name)
    if words := msgspec.json.decode(load, type=list[str]):
        _find(words[0])(*words[1:])
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        # A library has started a thread, so this process must not be forked.
        return
    gc.collect()
    # Garbage collections would write to the objects, and so copy memory that programs share.
    gc.freeze()
    if _serve(control):
        _find(function)()


def _find(function: str) -> Callable[..., None]:
    """Import the function given as ``"module:function"``."""
    module, _, name = function.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), name)
    return found


def _serve(control: socket.socket) -> bool:
    """Fork programs, and report their ends, until the parent is gone; return True in a program."""
    programs: dict[int, int] = {}  # descriptor of a program's process -> process id
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in programs:
                pid = programs.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                _tell(control, _Event(pid, os.waitstatus_to_exitcode(status)))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
            if not message:
                return False
            command = _COMMAND.decode(message)
            if isinstance(command, _Release):
                _become_reaper(control, programs)
                # The template could not replace itself by the reaper, so it continues as the
                # template.
                continue
            pid = os.fork()
            if pid == 0:
                for process in programs:
                    os.close(process)
                control.close()
                _become_program(command, descriptors[0])
                return True
            os.close(descriptors[0])
            process = os.pidfd_open(pid)
            programs[process] = pid
            poll.register(process, select.POLLIN)
            _tell(control, _Event(pid))


def _tell(control: socket.socket, event: _Event) -> None:
    with contextlib.suppress(OSError):  # the next receive notices that the parent is gone
        control.send(msgspec.json.encode(event))


def _become_reaper(control: socket.socket, programs: Mapping[int, int]) -> None:
    """Replace this process by `program_reaper`; returns only if the system refuses."""
    for descriptor in (control.fileno(), *programs):
        os.set_inheritable(descriptor, True)
    pairs = [f"{descriptor}:{pid}" for descriptor, pid in programs.items()]
    with contextlib.suppress(OSError):
        os.execv(
            sys.executable, [sys.executable, "-IS", str(_REAPER), str(control.fileno()), *pairs]
        )


def _become_program(start: _Start, output: int) -> None:
    """Turn this forked process into a program with its own output, environment and arguments."""
    os.setsid()  # Ctrl-C is for the parent, which ends its children in order
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv = ["baton", *start.arguments]
    _show_title([sys.executable, "-P", "-m", "baton", *start.arguments])


def _show_title(words: Sequence[str]) -> None:
    """Overwrite the command line of this process, which `ps` shows."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    start, end = (int(number) for number in stat[_ARG_START : _ARG_START + 2])
    title = os.fsencode(" ".join(words))[: end - start - 2]
    # If the last byte is not zero, Linux shows the title up to the first zero.
    ctypes.memmove(start, title.ljust(end - start - 1, b"\0") + b"\1", end - start)


if __name__ == "__main__":
    main()
