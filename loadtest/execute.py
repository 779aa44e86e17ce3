"""Executes `baton loadtest run`: plays the load, prints and writes results, judges them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from baton.api.errors import ConfigError
from baton.processes.process import print_error, stop_event
from loadtest.drills.audit import Auditor
from loadtest.drills.faults import Fault
from loadtest.drills.schedule import Schedule
from loadtest.drills.site import Site, UpOptions, started
from loadtest.exit_codes import EXIT_LAGGED, EXIT_NOTHING_CAME, EXIT_STOPPED
from loadtest.plan import LoadPlan, Search
from loadtest.report.fault_report import audit_line, fault_line, report_faults
from loadtest.report.outputs import Outputs
from loadtest.report.report import WIDTH, plain, print_summary, result_to_json, write_requests
from loadtest.report.report_steps import (
    cache_lines,
    search_lines,
    search_to_json,
    step_heading,
    step_line,
    steps_to_json,
)
from loadtest.run import RunResult
from loadtest.search import check_search, play_search
from loadtest.session import Session
from loadtest.steps import Step, Sweep, play_sweep
from loadtest.targets import open_target
from loadtest.targets.base import TargetOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that one `baton loadtest run` does; sweeps and searches vary the plan's load.

    Raises ConfigError for options that do not fit together.
    """

    plan: LoadPlan
    options: TargetOptions
    outputs: Outputs
    sweep: Sweep | None = None
    search: Search | None = None
    up: UpOptions | None = None
    faults: tuple[Fault, ...] = ()
    pids: Mapping[str, int] = field(default_factory=dict)
    auditor: Auditor | None = None

    def __post_init__(self) -> None:
        if (self.up is None) == (not self.options.url):
            raise ConfigError("target, up: exactly one of them must be given")
        if self.faults and (self.sweep is not None or self.search is not None):
            raise ConfigError("fault: is for a single run, not for a sweep or a search")
        if self.sweep is not None and self.search is not None:
            raise ConfigError("sweep, find_max_goodput: at most one of them can be given")
        if self.search is not None:
            check_search(self.plan)
        has_steps = self.sweep is not None or self.search is not None
        if has_steps and self.outputs.save_requests is not None:
            raise ConfigError("save_requests: is for a single run, not for a sweep or a search")


async def execute(job: Job) -> int:
    """Run the load test and return the exit code; raises BatonError."""
    job.outputs.check()
    stop = stop_event(asyncio.get_running_loop())
    if job.up is None:
        return await _play(job, Site(job.pids), stop)
    async with started(job.up, stop) as (site, address):
        # An operator's token may also send prompts. Without keys, no token is needed.
        api_key = job.options.api_key or site.admin_token
        options = dataclasses.replace(job.options, url=f"grpc://{address}", api_key=api_key)
        auditor = Auditor(address, site.admin_token)
        job = dataclasses.replace(job, options=options, up=None, auditor=auditor)
        return await _play(job, site, stop)


async def _play(job: Job, site: Site, stop: asyncio.Event) -> int:
    site.check(job.faults)
    target = await open_target(job.options)
    try:
        session = Session(target, stop)
        console = Console(width=WIDTH, highlight=False)
        if job.sweep is not None:
            return await _sweep(job, session, console, job.sweep)
        if job.search is not None:
            return await _search(job, session, console, job.search)
        schedule = Schedule(job.faults, site, job.auditor)
        return await _run(job, session, console, schedule)
    finally:
        await target.close()


async def _run(job: Job, session: Session, console: Console, schedule: Schedule) -> int:
    result = await session.play(job.plan, schedule.play)
    await schedule.check_leaks()
    print_summary(result, console)
    end_s = result.summary.window_s[1]
    faults = report_faults(job.plan, result.records, schedule.events, end_s)
    for fault in faults:
        console.print(fault_line(fault), soft_wrap=True)
    if schedule.audit is not None:
        console.print(audit_line(schedule.audit))
    document = result_to_json(result, shown(job.options)) | {
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "audit": schedule.audit and dataclasses.asdict(schedule.audit),
    }
    job.outputs.write(plain(document))
    if job.outputs.save_requests is not None:
        write_requests(job.outputs.save_requests, result)
    return judge([result])


async def _sweep(job: Job, session: Session, console: Console, sweep: Sweep) -> int:
    console.print(step_heading(sweep.variable))

    def show(step: Step) -> None:
        console.print(step_line(step), soft_wrap=True)

    steps = await play_sweep(session.play, job.plan, sweep, show)
    for line in cache_lines(steps):
        console.print(line, style="red", soft_wrap=True)
    job.outputs.write(plain(steps_to_json("sweep", sweep.variable, steps, shown(job.options))))
    return judge([step.result for step in steps])


async def _search(job: Job, session: Session, console: Console, search: Search) -> int:
    console.print(step_heading("rate"))

    def show(step: Step) -> None:
        console.print(step_line(step), soft_wrap=True)

    found = await play_search(session.play, job.plan, search, show)
    for line in cache_lines(found.steps):
        console.print(line, style="red", soft_wrap=True)
    for line in search_lines(found, job.plan.slo.text()):
        console.print(line, soft_wrap=True)
    if found.steps:
        job.outputs.write(plain(search_to_json(found, shown(job.options))))
    code = judge([step.result for step in found.steps])
    return code or (0 if found.holds_some else EXIT_NOTHING_CAME)


def shown(options: TargetOptions) -> dict[str, Any]:
    """Return those of the target's options that reports show, by name."""
    fields = dataclasses.asdict(options)
    del fields["api_key"]
    return fields


def judge(results: Sequence[RunResult]) -> int:
    """Print a line for each reason for which the load test fails; return the exit code."""
    if any(result.was_stopped for result in results):
        print_error("the run was stopped before its end")
        return EXIT_STOPPED
    if not all(result.summary.lag.kept_up for result in results):
        print_error(
            "the generator did not keep up: its own lag is part of these latencies. Use a less "
            "busy machine, less load, or a higher --max-lag-ms"
        )
        return EXIT_LAGGED
    if not any(result.summary.num_ok or result.summary.num_cancelled for result in results):
        print_error("no request of the measured window succeeded")
        return EXIT_NOTHING_CAME
    return 0
