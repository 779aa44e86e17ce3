"""Executes `baton loadtest tune`: searches, prints what each value did, writes the found file."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from baton.api.errors import ConfigError, reason_of
from baton.processes.process import print_error, stop_event
from loadtest.drills.site import UpOptions
from loadtest.exit_codes import EXIT_NOTHING_CAME, EXIT_STOPPED
from loadtest.options import TuneOptions, chosen_cores
from loadtest.plan import LoadPlan
from loadtest.report.report import WIDTH
from loadtest.tuning.settings import Setting, chosen_settings, config_text, described
from loadtest.tuning.state import TuningState
from loadtest.tuning.trials import TrialRunner
from loadtest.tuning.tune import Trial, Tried, Tuning, tune

KEPT_BY_ALL = 0.99  # share within the SLO at which the defaults leave nothing to gain


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningJob:
    """All that one `baton loadtest tune` does; raises ConfigError.

    Attributes:
        search: what the trials depend on, for the state file.
        has_seed: whether the user gave a seed, which must be that of the state file.
        write: file to write the found settings to.
    """

    plan: LoadPlan
    up: UpOptions
    settings: tuple[Setting, ...]
    search: dict[str, object]
    repeats: int
    budget_s: float
    state: Path
    write: Path
    has_seed: bool = False

    def __post_init__(self) -> None:
        if not self.plan.slo.limits:
            raise ConfigError("slo: must be given; goodput within it decides")
        if not self.write.resolve().parent.is_dir():
            raise ConfigError(f"write: no such folder: {self.write.resolve().parent}")
        if self.write.is_dir() or self.write.resolve() == self.state.resolve():
            raise ConfigError(f"write: must be a file other than --state, got {self.write}")
        given = {word.partition("=")[0] for word in (*self.up.node_args, *self.up.router_args)}
        for setting in self.settings:
            option = setting.name.replace("_", "-")
            if given & {f"--{option}", f"--no-{option}"}:
                raise ConfigError(
                    f"settings: {setting.name} is also in --node-args or --router-args, which win"
                )


def job_of(options: TuneOptions) -> TuningJob:
    """Return the tuning job that a command's options describe; raises ConfigError."""
    cores = chosen_cores(options.cores)
    return TuningJob(
        plan=options.trial_plan(),
        up=UpOptions(
            model=options.up,
            router_args=tuple(options.router_args.split()),
            node_args=tuple(options.node_args.split()),
            cores=cores,
            lend_cores=True,  # as in `baton up`
        ),
        settings=chosen_settings(options.settings, len(cores)),
        search=options.identity(len(cores)),
        repeats=options.repeats,
        budget_s=options.budget_s,
        state=Path(options.state),
        write=Path(options.write),
        has_seed=options.seed is not None,
    )


async def execute_tuning(job: TuningJob) -> int:
    """Run or resume the search and return the exit code; raises BatonError."""
    stop = stop_event(asyncio.get_running_loop())
    found = await search(job, stop)
    if stop.is_set():
        print_error(f"the search was stopped; the same command goes on with {job.state}")
        return EXIT_STOPPED
    trials = [*found.defaults, *(one.trial for one in found.tried)]
    return 0 if any(one.goodput_per_s for one in trials) else EXIT_NOTHING_CAME


async def search(job: TuningJob, stop: asyncio.Event) -> Tuning:
    """Run or resume the search; print what each value did, and write the found file.

    Args:
        stop: the caller sets this event to end the search.

    Raises BatonError.
    """
    console = Console(width=WIDTH, highlight=False)
    state = TuningState(job.state, job.search, job.plan.seed)
    if job.has_seed and state.seed != job.plan.seed:
        raise ConfigError(f"seed: {job.state} has {state.seed}, got {job.plan.seed}")
    if state.num_trials:
        console.print(
            f"{state.num_trials} trials are in {job.state}: the search goes on after them"
        )
    runner = TrialRunner(
        plan=dataclasses.replace(job.plan, seed=state.seed),
        up=job.up,
        state=state,
        repeats=job.repeats,
        budget_s=job.budget_s,
        on_trial=lambda trial: console.print(trial_line(trial), soft_wrap=True),
        stop=stop,
    )
    found = await tune(runner.measure, job.settings, job.repeats, runner.has_time)
    console.print(table_of(found))
    for line in verdict_lines(found, job.plan.slo.text()):
        console.print(line, soft_wrap=True)
    if found.wins:
        text = config_text(found.best, comments_of(found), job.up.node_args, job.up.router_args)
        try:
            job.write.write_text(text, encoding="utf-8")
        except OSError as error:
            problem = f"write: {job.write} cannot be written: {reason_of(error)}"
            raise ConfigError(problem) from error
        console.print(f"written: {job.write}, for `baton up --config {job.write}`")
    return found


def trial_line(trial: Trial) -> str:
    """Format a line about one finished trial."""
    if trial.error:
        return f"{described(trial.choice)}: failed: {trial.error}"
    return (
        f"{described(trial.choice)}, repeat {trial.repeat + 1}: "
        f"goodput/s {trial.goodput_per_s:.2f}, within SLO {trial.attainment:.0%}, "
        f"TTFT p99 {_ms(trial.ttft_p99_s)} ms, ITL p99 {_ms(trial.itl_p99_s)} ms"
    )


def table_of(found: Tuning) -> Table:
    """Return a table with a row per tried value: what it did, and whether it was kept."""
    table = Table(
        Column("setting", overflow="fold"),
        "value",
        "goodput/s",
        "within SLO",
        "TTFT p99",
        "ITL p99",
        "verdict",
    )
    for trial in found.defaults:
        table.add_row("defaults", f"repeat {trial.repeat + 1}", *_cells(trial), trial.error)
    for one in found.tried:
        table.add_row(one.setting, str(one.value), *_cells(one.trial), _verdict(one, found))
    for name, trials in (("defaults", found.rivals), ("best choice", found.finals)):
        for trial in trials:
            table.add_row(name, f"repeat {trial.repeat + 1}", *_cells(trial), trial.error)
    return table


def verdict_lines(found: Tuning, slo: str) -> list[str]:
    """Return sentences that say whether the best choice beats the defaults, and by what."""
    if not found.defaults:
        return ["The search was stopped before its first trial ended."]
    lines = [
        f"The defaults: goodput {found.default_goodput:.2f}/s within {slo}; a value must add more "
        f"than the noise, {found.noise:.2f}/s."
    ]
    if any(trial.attainment >= KEPT_BY_ALL for trial in found.defaults):
        lines.append(
            "The defaults keep the SLO at this rate, so nothing can be gained: raise --rate."
        )
    if found.was_cut:
        lines.append("The search was cut before its end; the same command goes on.")
    if found.best:
        lines.append(f"Best choice: {described(found.best)}.")
    if found.gain is not None:
        lines.append(f"Repeated in turns, it adds {found.gain.text()} to the goodput per second.")
    if found.best and found.gain is None:
        lines.append("It was not repeated, so no file is written.")
    elif not found.wins and not found.was_cut:
        lines.append("No setting beats the defaults by more than the noise; no file is written.")
    return lines


def comments_of(found: Tuning) -> Sequence[str]:
    """Return comments that say where the settings of a file come from."""
    assert found.gain is not None
    return (
        f"Found by baton loadtest tune: adds {found.gain.text()} requests/s of goodput",
        f"to the {found.default_goodput:.2f} of the defaults.",
    )


def _verdict(one: Tried, found: Tuning) -> str:
    if one.trial.error:
        return f"failed: {one.trial.error:.60}"
    text = f"{one.over:+.2f}"
    if one.is_kept:
        return f"{text}, kept"
    return f"{text}, within noise" if abs(one.over) <= found.noise else text


def _cells(trial: Trial) -> tuple[str, ...]:
    return (
        f"{trial.goodput_per_s:.2f}",
        f"{trial.attainment:.0%}",
        _ms(trial.ttft_p99_s),
        _ms(trial.itl_p99_s),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
