"""Count how often the threads of an idle deployment wake: each wake costs about 0.2 ms of a core.

The kernel counts how often each thread has gone to sleep. Other work on the machine makes threads
late, and does not make them wake more often.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

REST_S, WINDOW_S = 5.0, 8.0
# Rounds per second of the event loop: 6.5 on nodes and 21 at the router, 17 and 52 before ADR 0141
MOST_ROUNDS = {"router": 32, "p0": 11, "d0": 11}
# Wakes per second of all threads that run Python: 20 and 33, 37 and 72 before
MOST_WAKES = {"router": 48, "p0": 26, "d0": 26}


def count_sleeps(pid: int) -> Counter[str]:
    """Return how often each thread of a process has gone to sleep, by thread id.

    Threads of gRPC's core, which have names of their own, are left out.
    """
    found: Counter[str] = Counter()
    own_name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text(encoding="utf-8") != own_name:
            continue
        for line in (task / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                found[task.name] = int(line.split()[1])
    return found


def test_idle_processes_wake_rarely(deployment: LocalDeployment) -> None:
    with Client(deployment.config.listen) as client:
        client.generate([5, 6, 7], SamplingParams(max_tokens=3))
    time.sleep(REST_S)
    pids = {child.name: child.process.pid for child in deployment.children}
    before = {name: count_sleeps(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(WINDOW_S)
    after = {name: count_sleeps(pid) for name, pid in pids.items()}
    seconds = time.monotonic() - began
    wakes = {name: (after[name] - before[name]).total() / seconds for name in pids}
    rounds = {
        name: (after[name][str(pid)] - before[name][str(pid)]) / seconds
        for name, pid in pids.items()
    }
    found = f"rounds {rounds}, wakes {wakes}"
    assert all(rounds[name] <= most for name, most in MOST_ROUNDS.items()), found
    assert all(wakes[name] <= most for name, most in MOST_WAKES.items()), found
