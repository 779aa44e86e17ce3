"""Makes trouble in a real process: refuses a resource, and then raises in a thread.

A Python process with this folder in PYTHONPATH imports this module when it starts. The module does
what the environment asks for:

    BATON_TEST_TROUBLE=FILE      when the file holds a line, such as ``no descriptors, engine``:
                                 take that resource away, and have that thread raise soon
    BATON_TEST_READ_ONLY=1       see all files read-only, as in a container with a read-only root
    BATON_TEST_AUDIT=FILE        log what the threads that must not fail ask the system for
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_FILTER, _SECCOMP_ALL_THREADS = 1, 1
# The calls that make threads and processes (clone, fork, vfork, clone3), and seccomp's own.
_CALLS = {"x86_64": ((56, 57, 58, 435), 317), "aarch64": ((220, 435), 277)}
_WATCHED = ("engine", "kv-io")
_EVENTS = ("open", "socket.", "subprocess.", "_thread.start", "os.", "tempfile.", "glob.")


def take_descriptors() -> None:
    """Use up all descriptors."""
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, highest + 2))
    with contextlib.suppress(OSError):
        while True:
            os.dup(2)


def take_disk() -> None:
    """Let no file grow, as on a full disk, not even the log."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def take_threads() -> None:
    """Prevent new threads and processes: clone fails with EAGAIN."""

    class Instruction(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_uint16),
            ("if_true", ctypes.c_uint8),
            ("if_false", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))

    refused, seccomp = _CALLS[platform.machine()]
    code = [Instruction(0x20, 0, 0, 0)]  # load the number of the call
    for index, number in enumerate(refused):  # if it is this one, jump to the last line
        code.append(Instruction(0x15, len(refused) - index, 0, number))
    code.append(Instruction(0x06, 0, 0, 0x7FFF0000))  # allow
    code.append(Instruction(0x06, 0, 0, 0x00050000 | errno.EAGAIN))
    lines = (Instruction * len(code))(*code)
    program = Program(len(code), lines)
    system = ctypes.CDLL(None, use_errno=True)
    _check(system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(system.syscall(seccomp, _SECCOMP_FILTER, _SECCOMP_ALL_THREADS, ctypes.byref(program)))


def hang_disk() -> None:
    """Let a crash dump wait for ever, as on a dead disk."""
    from engine import crash_dump

    def wait() -> NoReturn:
        while True:
            time.sleep(3600)

    crash_dump._folder = wait


def see_all_read_only() -> None:
    """Give this process a read-only view of all mounts but devices; needs CAP_SYS_ADMIN."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_CLONE_NEWNS) or system.mount(
        b"none", b"/", None, _MS_REC | _MS_PRIVATE, None
    ):
        os._exit(77)  # the test is skipped
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in mounts:
        if place.startswith("/dev"):  # as in a container, where shared memory can be written to
            continue
        system.mount(b"none", place.encode(), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None)
    try:
        Path(f"/tmp/baton-{os.getpid()}").touch()
    except OSError:
        return
    os._exit(77)  # the test is skipped


def raise_in(thread: str) -> None:
    """Have a thread of a node raise in its next round."""

    def end(*arguments: Any) -> NoReturn:
        raise RuntimeError("killed by a test")

    if thread == "engine":
        from engine.engine import Engine

        Engine.schedule = end  # type: ignore[assignment, method-assign]
    else:
        from kvconnector.io import IoLoop

        IoLoop.round = end  # type: ignore[assignment, method-assign]


TROUBLES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "no descriptors": take_descriptors,
    "no disk": take_disk,
    "no threads": take_threads,
    "a disk that hangs": hang_disk,
}


def _check(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _wait_for_trouble(path: Path) -> None:
    while not (path.is_file() and path.stat().st_size):
        time.sleep(0.01)
    trouble, _, thread = path.read_text().strip().partition(", ")
    try:
        TROUBLES[trouble]()
    except Exception:
        traceback.print_exc()
        os._exit(78)
    raise_in(thread)


def _audit(path: str) -> None:
    """Log a line for each audit event of a watched thread."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    is_writing = threading.local()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not event.startswith(_EVENTS) or getattr(is_writing, "now", False):
            return
        thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        if thread is None or thread.name not in _WATCHED:
            return
        is_writing.now = True
        frames = traceback.extract_stack(limit=8)[:-1]
        places = " < ".join(f"{Path(f.filename).name}:{f.name}" for f in reversed(frames))
        os.write(descriptor, f"{thread.name} {event} {arguments[:2]!r} {places}\n".encode())
        is_writing.now = False

    sys.addaudithook(note)


# A node may replace itself by exec, and starts processes that are not nodes.
if {"prefill", "decode"} & set(sys.orig_argv):
    if os.environ.get("BATON_TEST_READ_ONLY"):
        see_all_read_only()
    if file := os.environ.get("BATON_TEST_AUDIT"):
        _audit(file)
    if file := os.environ.get("BATON_TEST_TROUBLE"):
        threading.Thread(target=_wait_for_trouble, args=(Path(file),), daemon=True).start()
