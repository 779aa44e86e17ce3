"""Logs: lines on standard error, as text for people or as JSON for programs.

A thread writes the lines, so the program does not wait if the log's reader stops reading. Texts
from other programs and users are escaped, so that they cannot begin a line or move a terminal's
cursor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

import structlog
from structlog.typing import Processor

from baton.api.printable import printable
from baton.telemetry.log_options import OURS, LogOptions, check_module

MAX_WAITING = 10_000
_MOST_AT_ONCE = 100
_CLOSE_TIMEOUT_S = 2.0

Event: TypeAlias = MutableMapping[str, Any]


def set_up_logging(level: str, log_format: str = "text", modules: Sequence[str] = ()) -> None:
    """Log to standard error from now on; raises ConfigError for invalid values.

    Args:
        modules: ``MODULE=LEVEL`` entries for modules that have a log level of their own.
    """
    LogOptions(log_level=level.lower(), log_format=log_format, log_modules=tuple(modules))
    close_logging()
    handler = _LineWriter(sys.stderr)
    handler.setFormatter(_make_formatter(log_format))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    _set_level(level)
    for one in modules:
        module, _, own = one.partition("=")
        logging.getLogger(module).setLevel(own.upper())


def close_logging() -> None:
    """Write the queued lines, for some seconds at most; later lines are lost."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LineWriter):
            handler.stop()


def change_log_level(level: str, module: str = "") -> str:
    """Change the log level and return the previous one.

    Args:
        module: module to change, with all modules inside it; empty: all modules but those with a
            level of their own.

    Raises:
        ConfigError: the level is unknown, or the module is not one of Baton's.
    """
    LogOptions(log_level=level.lower())
    if module:
        check_module("module", module)
    logger = logging.getLogger(module or OURS[0])
    previous = logging.getLevelName(logger.getEffectiveLevel()).lower()
    if module:
        logger.setLevel(level.upper())
    else:
        _set_level(level)
    return previous


def _set_level(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    for name in OURS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger().setLevel(max(number, logging.INFO))


class _LineWriter(logging.Handler):
    """Log handler that queues lines for a writing thread, and counts lines lost to a full queue.

    Attributes:
        num_lost: lines that were not written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.num_lost = 0
        self._told_lost = 0
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self.num_lost += 1
        # The arguments do not fit the message, or memory is exhausted.
        except Exception:
            self.handleError(record)

    # This method is not named `close`, because libraries that set up logging close all handlers.
    def stop(self) -> None:
        """Write the queued lines and end the thread."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        line = self._waiting.get()
        while line is not None:
            lines = [line]
            while len(lines) < _MOST_AT_ONCE and not self._waiting.empty():
                line = self._waiting.get()
                if line is None:
                    break
                lines.append(line)
            lost, self._told_lost = self.num_lost - self._told_lost, self.num_lost
            if lost:
                lines.append(self._line_of_loss(lost))
            with contextlib.suppress(OSError, ValueError):  # standard error is closed
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            if line is not None:
                line = self._waiting.get()

    def _line_of_loss(self, number: int) -> str:
        message = "%d lines of this log are lost: whoever reads it is too slow"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (number,), None)
        return self.format(record)


# ------------------------------------------------------------------ format of lines


def _make_formatter(log_format: str) -> logging.Formatter:
    of_record: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        _add_time,
        structlog.processors.format_exc_info,
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=of_record,
        processors=[_render_text if log_format == "text" else _render_json],
    )


def _add_time(logger: Any, name: str, event: Event) -> Event:
    at = datetime.fromtimestamp(event["_record"].created, UTC)
    event["time"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _render_text(logger: Any, name: str, event: Event) -> str:
    """Return ``TIME LEVEL LOGGER: message key=value ...``, with an indented traceback below."""
    head, fields, exception = _parts(event)
    text = f"{head['time']} {head['level'].upper()} {head['logger']}: {printable(head['message'])}"
    text += "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
    return "\n  ".join([text, *map(printable, exception.splitlines())])


def _render_json(logger: Any, name: str, event: Event) -> str:
    head, fields, exception = _parts(event)
    more = {"exception": exception} if exception else {}
    return json.dumps({**head, **fields, **more}, default=str)


def _parts(event: Event) -> tuple[Event, Event, str]:
    """Split a log event into the fields that all events have, other fields, and the traceback."""
    head = {
        "time": event["time"],
        "level": event["level"],
        "logger": event["logger"],
        "message": str(event["event"]),
    }
    no_field = (*head, "event", "exception", "exc_info", "stack_info", "stack")
    whose = {key: event.pop(key, None) for key in ("request_id", "trace_id")}
    fields = {
        key: value
        for key, value in {**whose, **event}.items()
        if key not in no_field and not key.startswith("_") and value is not None
    }
    return head, fields, event.get("exception") or ""


def _quoted(value: object) -> str:
    """Return a value as text, quoted if it has spaces, quotes or equals signs."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(char in text for char in ' "='):
        return text
    return printable(json.dumps(text, ensure_ascii=False))
