"""Unit test of a benchmark's end of the KV connector."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from benchmarks.hosts.kv_end import end_process
threading.Thread(target=end_process, args=(ValueError("the connector is dead"),)).start()
time.sleep(600)
"""


def test_an_end_whose_connector_died_ends() -> None:
    """Regression: the error was printed, and the parent waited for an answer without a limit."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "ValueError('the connector is dead')" in done.stderr
