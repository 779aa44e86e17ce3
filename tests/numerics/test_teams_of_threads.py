"""Teams of threads of the kernels in C: results, forks, and the ends of threads.

Refuses to know: what waiting costs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_kernels import dispatch, reference
from tests.numerics.test_native_ops import close

pytestmark = [
    pytest.mark.skipif(dispatch.native_ops() is None, reason="no native kernels here"),
    pytest.mark.skipif(sys.platform != "linux", reason="kernels have threads on Linux only"),
]
ROWS = torch.arange(512 * 768, dtype=torch.float32).remainder(97).reshape(512, 768) - 48
WEIGHT = torch.linspace(0.5, 1.5, 768)
FORK = """
import os, sys, torch
from baton_kernels import dispatch
native = dispatch.native_ops()
torch.set_num_threads(3)
x, weight = torch.arange(512 * 768.0).reshape(512, 768), torch.ones(768)
expected = native.rms_norm(x, weight, 1e-6)
for depth in range(2):
    if child := os.fork():
        done, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    again = native.rms_norm(x, weight, 1e-6)
torch.set_num_threads(1)  # torch's own threads do not survive a fork
os._exit(0 if torch.equal(expected, again) else 3)
"""


def norm(num_threads: int) -> Tensor:
    native = dispatch.native_ops()
    assert native is not None
    torch.set_num_threads(num_threads)
    return native.rms_norm(ROWS, WEIGHT, 1e-6)


def team_threads() -> set[str]:
    """Return the ids of the threads of all teams in this process."""
    threads = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            if (task / "comm").read_text(encoding="utf-8") == "baton-team\n":
                threads.add(task.name)
    return threads


@pytest.fixture(autouse=True)
def number_of_threads_as_before(threads_as_before: None) -> None:
    """A test changes the number of torch's threads."""


def test_any_number_of_threads_computes_the_bits_of_one() -> None:
    alone = norm(1)
    close(alone, reference.rms_norm(ROWS, WEIGHT, 1e-6))
    # A team grows, shrinks and grows again.
    for num_threads in (2, 5, 3, 16, 1, 8):
        assert torch.equal(norm(num_threads), alone), num_threads


def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    torch.set_num_threads(3)
    native = dispatch.native_ops()
    assert native is not None
    alone, wrong = native.rms_norm(ROWS, WEIGHT, 1e-6), list[int]()

    def call(number: int) -> None:
        for _ in range(50):
            if not torch.equal(native.rms_norm(ROWS, WEIGHT, 1e-6), alone):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def test_a_teams_threads_end_with_the_thread_that_called() -> None:
    norm(1)  # a team of this thread from another test stays as it is
    before = team_threads()  # teams of other tests' threads may still be ending
    started = set[str]()

    def call() -> None:
        norm(4)
        started.update(team_threads() - before)

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(timeout=60)
    assert len(started) == 3
    give_up_at = time.monotonic() + 30  # Python's join does not wait for the end of the C thread
    while team_threads() & started and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not team_threads() & started


def test_a_team_on_one_core_comes_to_an_end() -> None:
    """Threads that wait for each other on one core let the others run."""
    cores = os.sched_getaffinity(0)
    results = list[Tensor]()

    def call() -> None:
        os.sched_setaffinity(0, {min(cores)})
        results.extend(norm(8) for _ in range(20))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(timeout=120)
    assert len(results) == 20
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_forked_process_gets_a_team_of_its_own() -> None:
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
