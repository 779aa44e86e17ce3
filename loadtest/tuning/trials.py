"""TrialRunner: runs trials of a search, each with a deployment that it starts and stops."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.api.errors import BatonError
from baton.processes.held_folder import HeldFolder
from baton.processes.process import print_error
from loadtest.drills.site import UpOptions, started
from loadtest.plan import LoadPlan
from loadtest.report.summary import Summary
from loadtest.session import Session
from loadtest.targets import open_target
from loadtest.targets.base import TargetOptions
from loadtest.tuning.settings import Choice, config_text, deployment_of, node_args_of
from loadtest.tuning.state import TuningState
from loadtest.tuning.tune import StoppedError, Trial, round_of


@dataclass(slots=True)
class TrialRunner:
    """Runs the trials that the state lacks.

    A trial's options reach router and nodes in a configuration file, as `baton up --config` does.

    Attributes:
        repeats: see `tune`.
        budget_s: no new value is tried after this many seconds.
        on_trial: called with each new trial.
        stop: set from outside to end the search.
    """

    plan: LoadPlan
    up: UpOptions
    state: TuningState
    repeats: int
    budget_s: float
    on_trial: Callable[[Trial], None]
    stop: asyncio.Event
    _began: float = dataclasses.field(default_factory=time.monotonic)

    def has_time(self) -> bool:
        """Return whether the search may try more values."""
        return time.monotonic() - self._began < self.budget_s

    async def measure(self, choice: Choice, repeat: int) -> Trial:
        """Return a trial, from the state if it has been run; raises StoppedError."""
        found = self.state.find(choice, repeat)
        if found is not None:
            return found
        if self.stop.is_set():
            raise StoppedError
        try:
            trial = await self._run(choice, repeat)
        except BatonError as error:
            if self.stop.is_set():  # the trial was stopped, which says nothing about the choice
                raise StoppedError from error
            if not choice:  # nothing can be compared with defaults that do not run
                raise
            trial = Trial(
                choice=dict(choice), repeat=repeat, goodput_per_s=0.0, error=str(error)[:300]
            )
        self.state.add(trial)
        self.on_trial(trial)
        return trial

    async def _run(self, choice: Choice, repeat: int) -> Trial:
        with HeldFolder("baton-tune-") as folder:
            path = folder.path / "trial.toml"
            path.write_text(config_text(choice), encoding="utf-8")
            async with started(self._up_options(choice, path), self.stop) as (site, address):
                options = TargetOptions(url=f"grpc://{address}", api_key=site.admin_token)
                target = await open_target(options)
                try:
                    session = Session(target, self.stop)
                    result = await session.play(
                        dataclasses.replace(self.plan, round=round_of(repeat, self.repeats))
                    )
                finally:
                    await target.close()
        if result.was_stopped:
            raise StoppedError
        if not result.summary.lag.kept_up:
            print_error("the load generator lagged behind its plan in this trial")
        trial = trial_of(choice, repeat, result.summary)
        if trial.error and not choice:
            raise BatonError(f"every request of the defaults failed: {trial.error}")
        return trial

    def _up_options(self, choice: Choice, config: Path) -> UpOptions:
        shape, given = deployment_of(choice), ("--config", str(config))
        up = self.up
        if shape is not None:
            up = dataclasses.replace(up, num_prefill=shape.num_prefill, num_decode=shape.num_decode)
        return dataclasses.replace(
            up,
            router_args=(*given, *self.up.router_args),
            node_args=(*given, *self.up.node_args, *node_args_of(choice)),
        )


def trial_of(choice: Choice, repeat: int, summary: Summary) -> Trial:
    """Return the figures of a run that a search needs."""
    p99 = {name: found.p99 for name, found in summary.latencies.items()}
    return Trial(
        choice=dict(choice),
        repeat=repeat,
        goodput_per_s=summary.goodput_per_s or 0.0,
        attainment=summary.attainment or 0.0,
        ttft_p99_s=p99.get("ttft_s"),
        itl_p99_s=p99.get("itl_s"),
        error="" if summary.num_ok else next(iter(summary.error_examples.values()), "")[:300],
    )
