"""`baton loadtest`: runs its three commands, from options to exit codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import typer

from baton.api.errors import ConfigError
from baton.cli.command_line import CommandLine
from baton.cli.config_file import program
from baton.processes.process import run_program
from baton.telemetry.log_options import LogOptions
from loadtest.options import (
    CompareOptions,
    LoadOptions,
    RunOptions,
    TuneOptions,
    chosen_cores,
    path_of,
)

app = CommandLine(add_completion=False, help="Measure a deployment under load.")


@app.callback()
def _root() -> None:
    """Make Typer keep a group of commands even if it has a single command."""


@app.command()
@program
def run(options: RunOptions) -> None:
    """Play one load against one server and measure it.

    Exit codes: 0: success; 1: the load could not run, or no request succeeded; 3: the load
    generator could not keep up, so the figures are useless; 130: stopped.
    """

    async def main() -> int:
        # Import here, so that `--help` is fast.
        from loadtest.drills.audit import Auditor
        from loadtest.drills.faults import Fault, check_schedule
        from loadtest.drills.site import UpOptions, parse_pids
        from loadtest.execute import Job, execute
        from loadtest.report.outputs import Outputs
        from loadtest.steps import Sweep

        sweep = Sweep.parse(options.sweep) if options.sweep else None
        plan = options.run_plan((sweep.variable, sweep.values[0]) if sweep else None)
        if options.target.tls and options.up:
            raise ConfigError("tls_cert, tls_ca: are for --target; --up listens on loopback only")
        faults = check_schedule(list(map(Fault.parse, options.fault)), options.duration_s)
        up = UpOptions(
            model=options.up,
            num_prefill=options.prefill,
            num_decode=options.decode,
            num_encode=options.encode,
            router_args=tuple(options.router_args.split()),
            node_args=tuple(options.node_args.split()),
            encode_args=tuple(options.encode_args.split()),
            admin_token=options.admin_token,
            can_inject=any(one.act == "inject" for one in faults),
        )
        auditor = None
        if options.admin:
            auditor = Auditor(options.admin, options.admin_token, options.target.tls)
        job = Job(
            plan=plan,
            up=up if options.up else None,
            faults=faults,
            pids=parse_pids(options.pid),
            auditor=auditor,
            options=options.target,
            outputs=Outputs(
                json=path_of(options.json),
                save_requests=path_of(options.save_requests),
                html=path_of(options.html),
                png=path_of(options.png),
            ),
            sweep=sweep,
            search=options.search if options.find_max_goodput else None,
        )
        return await execute(job)

    _run(options, main)


@app.command()
@program
def compare(options: CompareOptions) -> None:
    """Compare deployments, disaggregated or not, with and without encode nodes, on equal cores.

    All deployments get the same requests. Each deployment is restarted before each repeat. With
    --find-max-goodput, each is started only once, and they are compared at the highest rate that
    each sustains. Goodput within --slo decides; effects on ITL and TTFT are also shown. Exit codes
    are the same as for `run`.
    """

    async def main() -> int:
        # Import here, so that `--help` is fast.
        from loadtest.compare import Comparison
        from loadtest.drills.site import UpOptions
        from loadtest.execute_comparison import execute_comparison
        from loadtest.load.shapes import Deployment
        from loadtest.plan import OpenLoop
        from loadtest.report.outputs import Outputs
        from loadtest.targets.base import TargetOptions

        load = OpenLoop(
            rate_per_s=options.rate, arrivals=options.arrivals, burstiness=options.burstiness
        )
        comparison = Comparison(
            plan=options.plan(load),
            deployments=tuple(map(Deployment.parse, options.deployments.split(","))),
            up=UpOptions(
                model=options.up,
                router_args=tuple(options.router_args.split()),
                node_args=tuple(options.node_args.split()),
                encode_args=tuple(options.encode_args.split()),
                cores=chosen_cores(options.cores),
            ),
            repeats=options.search.repeats,
            colocated_args=tuple(options.colocated_args.split()),
            search=options.search if options.find_max_goodput else None,
        )
        outputs = Outputs(
            json=path_of(options.json), html=path_of(options.html), png=path_of(options.png)
        )
        return await execute_comparison(comparison, TargetOptions(url=""), outputs)

    _run(options, main)


@app.command()
@program
def tune(options: TuneOptions) -> None:
    """Find options of nodes and router with which more requests meet an SLO; write them to a file.

    Each trial starts a deployment on this machine. After an interruption, repeat the command to
    continue with the trials in --state. Exit codes are the same as for `run`.
    """

    async def main() -> int:
        # Import here, so that `--help` is fast.
        from loadtest.tuning.execute_tuning import execute_tuning, job_of

        return await execute_tuning(job_of(options))

    _run(options, main)


def _run(options: LoadOptions, play: Callable[[], Awaitable[int]]) -> None:
    codes: list[int] = []

    async def main() -> None:
        codes.append(await play())

    failed = run_program(main, LogOptions(log_level=options.log_level))
    raise typer.Exit(failed or codes[0])
