"""Count how often the threads of an idle deployment wake: each wake costs about 0.3 ms of a core.

The kernel counts how often each thread has gone to sleep. A router whose timers are late looks at
its event loop's lag more often, and sends beats of its own, so the quietest window counts.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest

from baton import Client, SamplingParams
from baton.deployment.local_deployment import LocalDeployment

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(300)]

REST_S, WINDOW_S, NUM_WINDOWS = 5.0, 4.0, 4
# Rounds per second of the event loop: 5 on nodes and 10 at the router. Before ADR 0147, 7 and 15.
MOST_ROUNDS = {"router": 13, "p0": 6, "d0": 6}
# Wakes per second of all threads that run Python: 15 on nodes and 23 at the router. Before
# ADR 0147, 18 to 20 and 28.
MOST_WAKES = {"router": 26, "p0": 17, "d0": 17}


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
    counts = [{name: count_sleeps(pid) for name, pid in pids.items()}]
    for _ in range(NUM_WINDOWS):
        time.sleep(WINDOW_S)
        counts.append({name: count_sleeps(pid) for name, pid in pids.items()})
    pairs = list(itertools.pairwise(counts))
    # Sleeps of a window last at least `WINDOW_S`, so these are upper bounds per second
    wakes = {
        name: min((after[name] - before[name]).total() for before, after in pairs) / WINDOW_S
        for name in pids
    }
    rounds = {
        name: min(after[name][str(pid)] - before[name][str(pid)] for before, after in pairs)
        / WINDOW_S
        for name, pid in pids.items()
    }
    found = f"rounds {rounds}, wakes {wakes}"
    assert all(rounds[name] <= most for name, most in MOST_ROUNDS.items()), found
    assert all(wakes[name] <= most for name, most in MOST_WAKES.items()), found
