"""AuditLog: writes who joined, read, changed or was refused, as JSON lines, to a file of its own.

The audit log does not depend on the program's log and log level. A thread writes the file, so a
full or slow disk delays no call. Events that cannot be written are counted, and the program's log
and the next line of the file tell their number.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.access.access_options import STANDARD_OUTPUT
from baton.access.identity import Principal
from baton.api.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
_MAX_VALUE_CHARS = 200
_CLOSE_TIMEOUT_S = 2.0
_FILE_MODE = 0o600


class AuditKind(StrEnum):
    """Kinds of events in the audit log."""

    JOINED = "joined"
    LEFT = "left"
    LOOKED = "looked"
    CHANGED = "changed"
    REFUSED = "refused"  # a known caller lacks the permission
    FAILED = "failed"  # the caller is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One line of the audit log. Contains no keys, tokens or prompts.

    Attributes:
        who: name of the caller; empty: the program needs no credentials, or the caller is unknown.
        tenant: the caller's tenant.
        address: IP address of the caller.
        call: name of the call or action.
        arguments: the call's arguments.
        problem: why the call failed; empty: it succeeded.
        at: time of the event, by `time.time`.
    """

    kind: AuditKind
    who: str = ""
    tenant: str = ""
    address: str = ""
    call: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    at: float = field(default_factory=time.time)

    @classmethod
    def of(cls, kind: AuditKind, principal: Principal | None, **fields: str) -> AuditEvent:
        """Make an event of a caller; ``principal`` is None for an unknown caller."""
        name, tenant = (principal.name, principal.tenant) if principal else ("", "")
        return cls(kind=kind, who=name, tenant=tenant, **fields)  # type: ignore[arg-type]


class AuditLog:
    """The audit log of one program; any thread may write.

    Args:
        path: file to append to; ``-``: standard output; empty: log nothing.
        program: name of the program in each line, such as "router" or a node's name.

    Attributes:
        num_lost: events that could not be written.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(
        self, path: str = "", *, program: str = "", max_waiting: int = MAX_WAITING
    ) -> None:
        self.num_lost = 0
        self._path = path
        self._program = program
        self._told_lost = 0
        self._waiting: queue.Queue[AuditEvent | None] = queue.Queue(max_waiting)
        self._descriptor = -1
        self._reopens = threading.Event()
        self._thread: threading.Thread | None = None
        if path:
            try:
                self._descriptor = _open(path)
            except OSError as error:
                raise ConfigError(
                    f"audit_log: cannot write to {path} ({error.strerror})"
                ) from error
            self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
            self._thread.start()

    def write(self, event: AuditEvent) -> None:
        """Queue an event for the writing thread; return at once."""
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._lose("the disk is too slow")

    def note_suppressed(self, number: int = 1) -> None:
        """Count events that were not logged because their rate limit was reached."""
        self.num_lost += number

    def reopen(self) -> None:
        """Open the file at ``path`` again, because the old file may have been moved."""
        self._reopens.set()

    def close(self) -> None:
        """Write the queued events, for two seconds at most."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            thread.join(_CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                if self._reopens.is_set():
                    self._reopens.clear()
                    self._open_again()
                self._write_all(self._line(event))
            except OSError as error:
                self._lose(error.strerror or str(error))
                with contextlib.suppress(OSError):
                    self._open_again()
            except ValueError as error:  # the event has text that cannot be encoded as UTF-8
                self._lose(str(error))

    def _open_again(self) -> None:
        descriptor = _open(self._path)
        old, self._descriptor = self._descriptor, descriptor
        if old not in (-1, sys.__stdout__.fileno() if sys.__stdout__ else -1):
            os.close(old)

    def _write_all(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _line(self, event: AuditEvent) -> bytes:
        at = datetime.datetime.fromtimestamp(event.at, datetime.UTC)
        record: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "program": self._program,
            "event": event.kind.value,
            "who": event.who,
            "tenant": event.tenant,
            "address": event.address,
            "call": event.call,
            "arguments": dict(event.arguments),
            "problem": event.problem,
        }
        lost, self._told_lost = self.num_lost - self._told_lost, self.num_lost
        if lost:
            record["left_out_before"] = lost
        shown = {name: value for name, value in record.items() if value or name == "who"}
        return (json.dumps(shown, default=str) + "\n").encode()

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        # Log a line for the 1st, 2nd, 4th, 8th ... lost event, so that the lines stay few.
        if self.num_lost & (self.num_lost - 1) == 0:
            logger.error("audit_log: %d events are lost: %s", self.num_lost, why)


def clip(value: object) -> str:
    """Cut a value to the length that audit lines show."""
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _open(path: str) -> int:
    if path == STANDARD_OUTPUT:
        return sys.__stdout__.fileno() if sys.__stdout__ else -1
    # With O_NONBLOCK, opening a pipe without a reader raises an error instead of waiting.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, _FILE_MODE)
    # O_NONBLOCK was only needed for opening the file; writing may block.
    os.set_blocking(descriptor, True)
    return descriptor
