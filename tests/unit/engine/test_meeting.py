"""Unit tests of Meeting: ranks connect, however many strangers connect first."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from engine.executors.meeting import _HELLO, _LINKS, Meeting
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium

MOST = 16


def test_strangers_keep_no_rank_out_and_no_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.executors.meeting._MAX_UNKNOWN", MOST)
    meeting = Meeting("127.0.0.1", [1])
    there = "127.0.0.1", meeting.invitation.port
    before = threading.active_count()
    with contextlib.ExitStack() as links:
        for _ in range(3 * MOST):
            links.enter_context(socket.create_connection(there))
        wait_until(lambda: len(meeting._unknown) <= MOST, "strangers that have to go")
        wait_until(lambda: threading.active_count() - before <= MOST + 1, "their threads")
        for kind in _LINKS:
            link = links.enter_context(socket.create_connection(there))
            link.sendall(_HELLO.pack(meeting.invitation.key, 1, kind))
        (rank,) = meeting.wait(10.0, lambda: None)
        assert rank.rank == 1
        rank.end_rank()
        rank.beside.close()
