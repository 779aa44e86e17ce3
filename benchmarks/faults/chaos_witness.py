"""Witness: records what each program of a drill does, so that a hung client can be explained.

    every second    processor time of each program, its time in the run queue, its state, the time
                    that the machine took away, and by how much the drill's own clock was late
    a long wait     each program's threads and tasks (SIGUSR2), once per wait

The witness records on its own thread, so it also sees when the drill's event loop is blocked.
Refuses to know: requests, drills.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.deployment.local_deployment import LocalDeployment
from baton.telemetry.stack_dump import DUMP_SIGNAL

TICK_S = 1.0
MOST_TICKS = 120
# Wait of a client, in seconds, at which all stacks are written; a client hangs after 30 s.
LONG_WAIT_S = 20.0
DUMP_TIME_S = 1.0  # seconds that programs get to write their stacks
_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """Times of one process since its start, in seconds, and its state (R, S, D, T, Z).

    Attributes:
        queue_s: sum over the threads of the time in which they were ready to run, but had no core.
    """

    state: str
    cpu_s: float
    queue_s: float


def read_times(pid: int) -> ProgramTimes | None:
    """Return a process's times; None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        queues_ns = [_read_queue_ns(one) for one in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, IndexError):
        return None
    cpu_ticks = int(fields[11]) + int(fields[12])
    return ProgramTimes(fields[0], cpu_ticks / _PER_S, sum(queues_ns) / 1e9)


def _read_queue_ns(task: Path) -> int:
    """Return how long a thread was ready to run, but had no core; 0: the thread has ended."""
    with contextlib.suppress(OSError):
        return int((task / "schedstat").read_text().split()[1])
    return 0


def read_stolen_s() -> float:
    """Return the seconds of all cores that the host of this virtual machine took away."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / _PER_S


class Witness:
    """Watches the programs of a deployment during the ``with`` block.

    Args:
        longest_wait_s: returns for how many seconds the oldest open request has been open.

    Attributes:
        stacks: what each program wrote when a client had waited `LONG_WAIT_S`.
        late_s: most seconds by which a record was late; large if the drill itself was stopped.
    """

    def __init__(self, deployment: LocalDeployment, longest_wait_s: Callable[[], float]) -> None:
        self._deployment, self._longest_wait_s = deployment, longest_wait_s
        self._ticks: deque[str] = deque(maxlen=MOST_TICKS)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self.stacks: dict[str, str] = {}
        self.late_s = 0.0

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def tell(self) -> list[str]:
        """Return lines with the recorded seconds, and the stacks."""
        lines = list(self._ticks)
        for name, text in self.stacks.items():
            lines += [f"--- {name}", text]
        return lines

    def _run(self) -> None:
        before: Mapping[int, ProgramTimes] = {}
        stolen_before_s, was_long = read_stolen_s(), False
        due = time.monotonic() + TICK_S
        while not self._is_over.wait(max(due - time.monotonic(), 0.0)):
            now = time.monotonic()
            late_s, due = now - due, now + TICK_S
            self.late_s = max(self.late_s, late_s)
            pids = self._pids()
            found = {pid: times for pid in pids if (times := read_times(pid)) is not None}
            stolen_s, wait_s = read_stolen_s(), self._longest_wait_s()
            programs = [_describe(pids[pid], found[pid], before.get(pid)) for pid in found]
            self._ticks.append(
                f"{now:.1f} s: late {late_s:.2f}, stolen {stolen_s - stolen_before_s:.2f}, "
                f"a client waits {wait_s:.1f} s; {'; '.join(programs)}"
            )
            before, stolen_before_s = found, stolen_s
            is_long = wait_s > LONG_WAIT_S
            if is_long and not was_long:
                self._dump(pids)
            was_long = is_long

    def _pids(self) -> dict[int, str]:
        """Return the names of the running programs by process id, the drill's own among them."""
        children = self._deployment.children
        running = {one.process.pid: one.name for one in children if one.process.poll() is None}
        return {os.getpid(): "drill", **running}

    def _dump(self, pids: Mapping[int, str]) -> None:
        """Let all programs write their stacks to their logs; keep what they wrote."""
        children = {one.name: one for one in self._deployment.children}
        marks = {
            name: children[name].log.stat().st_size for name in pids.values() if name in children
        }
        for pid, name in pids.items():
            if name in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, DUMP_SIGNAL)
        time.sleep(DUMP_TIME_S)
        for name, mark in marks.items():
            written = children[name].log.read_bytes()[mark:]
            self.stacks[name] = written.decode(errors="replace")


def _describe(name: str, now: ProgramTimes, before: ProgramTimes | None) -> str:
    """Return a program's state, and its times since the last record, in seconds."""
    if before is None:
        return f"{name} {now.state}"
    cpu_s, queue_s = now.cpu_s - before.cpu_s, now.queue_s - before.queue_s
    return f"{name} {now.state} cpu {cpu_s:.2f} queue {queue_s:.2f}"
