"""Worker template: loads one kind of work, and forks workers that do it within limits.

`worker_processes` starts the template and controls it over a socket, with framed bytes and without
pickle. The operating system ends a worker that exceeds its limits, whatever the worker does, so the
work need not be trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.api.errors import InvalidRequestError

# First message of a worker, which says that the worker waits for work.
READY = b"!"
# Header of a frame from the parent: number of bytes that follow.
LENGTH = struct.Struct("<I")
# Header of an answer: number of bytes that follow, and whether the worker now ends because its
# memory has grown.
ANSWER = struct.Struct("<I?")
# A command on the template's control socket, and the number of the worker that it is about.
COMMAND = struct.Struct("<cI")
FORK, KILL = b"f", b"k"
# First byte of an answer: the kind of its content.
DONE, REFUSED, TOO_MUCH = b"d", b"r", b"m"

# Size of a worker's stack. Libraries recurse in nested texts; a stack overflow ends only the
# worker.
_STACK_BYTES = 64 * 2**20
# A worker whose memory has grown by more bytes is replaced, so that left-over memory does not count
# against the next piece of work.
_KEPT_BYTES = 8 * 2**20
_PR_SET_PDEATHSIG = 1

Work = Callable[[bytes], bytes]


class WorkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one piece of work.

    Attributes:
        cpu_s: CPU time over all threads.
        wall_s: time until the answer; longer than ``cpu_s``, because the machine may be busy.
        memory_bytes: memory in addition to the worker's memory at its start.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.cpu_s:g} s of processor time or {self.memory_bytes / 2**20:.0f} MiB"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a template, sent to it as the first message.

    Attributes:
        work: ``"module:function"`` that takes ``options`` and returns the function for the work.
    """

    work: str
    options: dict[str, str]
    limits: WorkLimits


_SETUP = msgspec.json.Decoder(Setup)


def serve(control: socket.socket, work: Work, limits: WorkLimits) -> None:
    """Fork and end workers as the parent commands, until the parent is gone."""
    workers: dict[int, int] = {}  # number -> process id; workers are reaped only here
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not message:
            break
        command, number = COMMAND.unpack(message)
        if command == KILL:
            if number in workers:
                _end(workers.pop(number))
            continue
        process_id = os.fork()
        if process_id == 0:
            control.close()
            _be_worker(socket.socket(fileno=descriptors[0]), work, limits)
        os.close(descriptors[0])
        workers[number] = process_id
    for process_id in workers.values():
        _end(process_id)


def _end(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)


def _be_worker(link: socket.socket, work: Work, limits: WorkLimits) -> None:
    """Run one worker; never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If memory runs out, the kernel should kill workers before other processes.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # Output is dropped: libraries print when they abort for lack of memory, but the parent logs
    # this.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(link, work, limits))
    thread.start()
    thread.join()
    os._exit(0)


def _answer_all(link: socket.socket, work: Work, limits: WorkLimits) -> None:
    """Do work until the parent closes the link, or until the worker's memory has grown too much."""
    resident_bytes = resident_memory_bytes()
    limit = _memory_bytes(0) + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    link.sendall(READY)
    while (frame := _receive(link)) is not None:
        # Without a handler, the signals of both limits end the process, whatever it does.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        answer = _answer(work, frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        del frame
        has_grown = resident_memory_bytes() - resident_bytes > _KEPT_BYTES
        link.sendall(ANSWER.pack(len(answer), has_grown) + answer)
        if has_grown:
            return


def _answer(work: Work, frame: bytes) -> bytes:
    try:
        return DONE + work(frame)
    except InvalidRequestError as error:
        return REFUSED + msgspec.json.encode([error.field, error.problem])
    except MemoryError:
        return TOO_MUCH


def _receive(link: socket.socket) -> bytes | None:
    """Return the next frame, or None if the parent is gone."""
    header = link.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    num_bytes = LENGTH.unpack(header)[0]
    frame = link.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
    return frame if len(frame) == num_bytes else None


def resident_memory_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _memory_bytes(1)


def _memory_bytes(column: int) -> int:
    """Return this process's use of memory in bytes, from a column of /proc/self/statm.

    Args:
        column: 0: address space; 1: resident memory.
    """
    columns = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(columns[column]) * resource.getpagesize()


def main() -> None:
    """Run ``python -m baton.processes.worker_template DESCRIPTOR``."""
    serve_parent(socket.socket(fileno=int(sys.argv[1])), _import_work)


def _import_work(setup: Setup) -> Work:
    module, _, function = setup.work.partition(":")
    work: Work = getattr(importlib.import_module(module), function)(setup.options)
    return work


def serve_parent(control: socket.socket, make_work: Callable[[Setup], Work]) -> None:
    """Load the work that the first message names, and serve until the parent is gone.

    Args:
        make_work: returns the function that does the work.
    """
    if not (message := control.recv(2**16)):
        return
    setup = _SETUP.decode(message)
    work = make_work(setup)
    gc.collect()
    # Garbage collections would write to these objects, and so copy memory that all workers share.
    gc.freeze()
    serve(control, work, setup.limits)


if __name__ == "__main__":
    main()
