"""Tests of the watcher of a rank: it reports a stopped rank, ends it, and ends with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.executors import rank_watch

pytestmark = pytest.mark.medium

PROGRAM = """
import runpy, sys
runpy.run_path(sys.argv[1])["start_watch"](int(sys.argv[2]))
print("watched", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def watched() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process, and the other end of its line of life."""
    life_line, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, rank_watch.__file__, str(theirs)],
        pass_fds=[theirs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    os.close(theirs)
    assert process.stdout is not None
    assert process.stdout.readline() == b"watched\n"
    yield process, life_line
    process.kill()
    process.communicate()
    os.close(life_line)


def heard(life_line: int) -> bytes:
    assert select.select([life_line], [], [], 30)[0], "nobody says anything, and nobody has ended"
    return os.read(life_line, 100)


def test_a_stopped_process_is_told_of_and_ended(
    watched: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, life_line = watched
    process.send_signal(signal.SIGSTOP)
    assert heard(life_line) == b"\0\0\0\1" + rank_watch.WAS_STOPPED
    assert process.wait(30) == -signal.SIGKILL
    assert heard(life_line) == b""  # the watch has ended, too


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_watch_ends_with_the_process(
    watched: tuple[subprocess.Popen[bytes], int], number: signal.Signals
) -> None:
    process, life_line = watched
    process.send_signal(number)
    assert heard(life_line) == b""
