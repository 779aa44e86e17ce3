"""Unit tests of the audit log: what is in a line, rotation, and disks that are full or stuck."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from baton.access.audit_log import AuditEvent, AuditKind, AuditLog
from baton.api.errors import ConfigError
from tests.fakes.time.waiting import wait_until


def event(call: str = "Drain") -> AuditEvent:
    return AuditEvent(
        kind=AuditKind.CHANGED, who="bob", tenant="ops", address="10.0.0.1", call=call,
        arguments={"node": "d0"}, at=0.0,
    )  # fmt: skip


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_event_is_one_line_of_json_whatever_the_log_level(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    before = logging.getLogger().level
    logging.getLogger().setLevel(logging.CRITICAL)
    try:
        log = AuditLog(str(path), program="router")
        log.write(event())
        log.close()
    finally:
        logging.getLogger().setLevel(before)
    assert lines(path) == [
        {
            "time": "1970-01-01T00:00:00.000+00:00", "program": "router", "event": "changed",
            "who": "bob", "tenant": "ops", "address": "10.0.0.1", "call": "Drain",
            "arguments": {"node": "d0"},
        }
    ]  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_moved_away_is_made_again_when_told(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log = AuditLog(str(path))
    log.write(event("one"))
    wait_until(lambda: path.read_text(encoding="utf-8"), "the first line")
    path.rename(old)
    log.reopen()
    log.write(event("two"))
    log.close()
    assert [line["call"] for line in lines(old)] == ["one"]
    assert [line["call"] for line in lines(path)] == ["two"]


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"^audit_log: cannot write to "):
        AuditLog(str(tmp_path / "audit.jsonl"))


def test_a_reader_that_is_stuck_holds_up_nobody_and_what_is_lost_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AuditLog(str(path), max_waiting=10)
    for number in range(2000):  # more than a pipe and the queue hold
        log.write(event(f"{number} {'x' * 100}"))
    assert log.num_lost > 0
    assert "audit_log: 1 events are lost: the disk is too slow" in caplog.text
    os.set_blocking(reader, True)
    text = b""
    while b'"left_out_before"' not in text:  # it goes on when the reader does, and says so
        text += os.read(reader, 65536)
        log.write(event("behind"))
    os.close(reader)
    log.close()


def test_a_disk_that_is_full_is_said_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog("/dev/full")
    log.write(event())
    log.close()
    assert log.num_lost == 1
    assert "audit_log: 1 events are lost: No space left on device" in caplog.text
