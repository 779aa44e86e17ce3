"""Run: plays a plan once against a target; all reports are made from its RunResult."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.environment import Environment, environment
from loadtest.load.player import Beside, Player
from loadtest.load.record import RequestRecord
from loadtest.plan import LoadPlan
from loadtest.report.summary import Summary, summarize
from loadtest.targets.base import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        target: the target's description, for the report.
        elapsed_s: time from the first sending to the last answer.
        cpu_share: CPU time of the load generator divided by the run's time.
        load_average_at_end: the machine's load average over the last minute of the run.
        was_stopped: whether the user or a signal ended the run early.
    """

    plan: LoadPlan
    target: dict[str, str]
    environment: Environment
    summary: Summary
    records: Sequence[RequestRecord]
    elapsed_s: float
    cpu_share: float
    load_average_at_end: float
    was_stopped: bool


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which delays requests by 5 to 70 ms at 2,000 streams.

    The player and the targets make no reference cycles (a test counts them), so no garbage
    accumulates meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Run:
    """Plays one plan against an open target, which stays open afterwards."""

    def __init__(
        self, plan: LoadPlan, target: Target, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.plan = plan
        self.player = Player(plan, target, now=now)
        self._target = target

    async def execute(self, stop: asyncio.Event, beside: Beside | None = None) -> RunResult:
        """Play the plan until it ends or ``stop`` is set; raises ConfigError.

        Args:
            beside: a job that starts with the run and is cancelled at its end.
        """
        where = environment()
        self.player.prepare()
        cpu_before_s = time.process_time()
        with _no_collection():
            await self.player.play(stop, beside)
        elapsed_s = self.player.clock.now_s()
        cpu_s = time.process_time() - cpu_before_s
        return RunResult(
            plan=self.plan,
            target=self._target.describe(),
            environment=where,
            summary=summarize(self.plan, self.player.records, self.player.loop_lag),
            records=self.player.records,
            elapsed_s=elapsed_s,
            cpu_share=cpu_s / max(elapsed_s, 1e-9),
            load_average_at_end=os.getloadavg()[0],
            was_stopped=self.player.was_stopped,
        )
