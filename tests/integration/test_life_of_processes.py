"""`baton up` ends everything it started, however it ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S, free_address

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(200)]


@contextlib.contextmanager
def baton_up(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A ready `baton up` and its children."""
    process = subprocess.Popen(
        [sys.executable, "-m", "baton", "up", "--model", str(DEMO_MODEL),
         "--listen", free_address(), "--http-listen", free_address(), "--kv-cache-memory", "64M",
         "--log-folder", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        for line in process.stdout:
            if "baton generate" in line:
                break
            assert time.monotonic() < give_up_at
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        yield process, children
    finally:
        process.kill()
        process.communicate()


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ending_up_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    before = shared_memory()
    with baton_up(tmp_path) as (process, children):
        os.kill(process.pid, number)
        _, alive = psutil.wait_procs(children, timeout=15)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not alive, [p.cmdline() for p in alive]
        if number is not signal.SIGKILL:
            assert process.wait(15) == 0
    assert shared_memory() <= before
