"""Unit tests of FileThread: an error of its work does not end the thread."""

from __future__ import annotations

import threading

import pytest

from engine.kv_files import file_thread
from engine.kv_files.file_thread import FileThread


def test_the_thread_survives_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_thread, "_TICK_S", 0.0)
    is_idle_again, is_done = threading.Event(), threading.Event()
    num_idle = 0

    def fail_first() -> None:
        nonlocal num_idle
        num_idle += 1
        if num_idle == 1:
            raise ValueError("a listing that no library should send")
        is_idle_again.set()

    def fail() -> None:
        raise ValueError("a piece of work that should not fail")

    thread = FileThread("kv-files-test", fail_first)
    thread.submit(fail)
    thread.submit(is_done.set)
    assert is_done.wait(60)
    assert is_idle_again.wait(60)
    thread.close(60)
    assert "a listing that no library should send" in caplog.text
    assert "a piece of work that should not fail" in caplog.text
