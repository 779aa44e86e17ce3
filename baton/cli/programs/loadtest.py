"""`baton loadtest`: options of its commands, and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.api.errors import ConfigError
from baton.cli.command_line import CommandLine
from baton.cli.programs.compare import compare
from baton.cli.programs.loadtest_options import (
    ArrivalsOption,
    AttainmentOption,
    BurstinessOption,
    CancelRateOption,
    ConcurrencyOption,
    DrainTimeoutOption,
    DurationOption,
    FindMaxGoodputOption,
    HtmlOption,
    InputTokensOption,
    JsonOption,
    LogLevelOption,
    MaxLagOption,
    NodeArgsOption,
    NumRequestsOption,
    OutputTokensOption,
    PngOption,
    PrecisionOption,
    PrefixGroupsOption,
    PrefixTokensOption,
    RateOption,
    RouterArgsOption,
    SeedOption,
    SloOption,
    SlowdownOption,
    ThinkOption,
    TimeoutOption,
    TurnPauseOption,
    TurnsOption,
    VocabSizeOption,
    WarmupOption,
    fresh_seed,
)
from baton.processes.process import run_program
from baton.telemetry.log_options import LogOptions
from loadtest.drills.faults import NOTATION as FAULT_NOTATION
from loadtest.drills.faults import Fault, check_schedule
from loadtest.load.lengths import parse_lengths
from loadtest.plan import ClosedLoop, Load, LoadPlan, OpenLoop, TraceReplay
from loadtest.slo import Slo
from loadtest.targets.base import TargetOptions

if TYPE_CHECKING:
    from loadtest.steps import Sweep

app = CommandLine(add_completion=False, help="Measure a deployment under load.")


@app.callback()
def _root() -> None:
    """Keep the app a group of commands."""


def choose_load(
    rate: float | None,
    arrivals: str,
    burstiness: float,
    concurrency: int | None,
    think_s: float,
    trace: Path | None,
    slowdown: float,
    sweep: Sweep | None,
) -> Load:
    """Return the requested load, for a sweep the first one; raises ConfigError."""
    given = sum(option is not None for option in (rate, concurrency, trace, sweep))
    if given != 1:
        raise ConfigError("rate, concurrency, trace, sweep: exactly one of them must be given")
    if sweep is not None and sweep.variable == "rate":
        rate = sweep.values[0]
    elif sweep is not None:
        concurrency = int(sweep.values[0])
    if rate is not None:
        return OpenLoop(rate_per_s=rate, arrivals=arrivals, burstiness=burstiness)
    if concurrency is not None:
        return ClosedLoop(concurrency=concurrency, think_s=think_s)
    assert trace is not None
    return TraceReplay(path=trace, slowdown=slowdown)


@app.command()
def run(
    target: TargetOptions,
    up: Annotated[
        str,
        typer.Option(
            help="Instead of --target: start a router and nodes of this model on this machine, "
            "as baton up does, and stop them in the end."
        ),
    ] = "",
    prefill: Annotated[int, typer.Option(help="Up: prefill nodes.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Up: decode nodes.", min=1)] = 1,
    node_args: NodeArgsOption = "",
    router_args: RouterArgsOption = "",
    rate: RateOption = None,
    arrivals: ArrivalsOption = "poisson",
    burstiness: BurstinessOption = 1.0,
    concurrency: ConcurrencyOption = None,
    think_s: ThinkOption = 0.0,
    trace: Annotated[
        Path | None, typer.Option(help="Replay: a file in the format of Mooncake's traces.")
    ] = None,
    slowdown: SlowdownOption = 1.0,
    sweep: Annotated[
        str,
        typer.Option(
            help="Several runs: rate=1,2,4 (open loop) or concurrency=1,8,64 (closed loop), each "
            "with its warm-up and duration."
        ),
    ] = "",
    find_max_goodput: FindMaxGoodputOption = False,
    attainment: AttainmentOption = 0.9,
    repeats: Annotated[
        int, typer.Option(help="Search: so many times, for a confidence interval.")
    ] = 3,
    precision: PrecisionOption = 0.1,
    fault: Annotated[
        list[str] | None,
        typer.Option(help=f"What goes wrong in the run, may be repeated: {FAULT_NOTATION}."),
    ] = None,
    pid: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PID of a process for kill and stop, without --up; repeated."),
    ] = None,
    admin: Annotated[
        str,
        typer.Option(
            help="host:port of Baton's router, to be asked for KV blocks that nobody owns and that "
            "are held after the run; with --up: that router."
        ),
    ] = "",
    admin_token: Annotated[str, typer.Option(help="For --admin.")] = "",
    input_tokens: InputTokensOption = "512",
    output_tokens: OutputTokensOption = "128",
    prefix_groups: PrefixGroupsOption = 0,
    prefix_tokens: PrefixTokensOption = 0,
    cancel_rate: CancelRateOption = 0.0,
    turns: TurnsOption = "1",
    turn_pause_s: TurnPauseOption = 0.0,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="Prompts and conversations of this file instead of random tokens: ShareGPT, or "
            "JSONL with prompt, messages or turns."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tokenizer.json: outputs are as long as the data set's answers, where "
            "it has them; else as --output-tokens says."
        ),
    ] = None,
    seed: SeedOption = None,
    warmup_s: WarmupOption = 0.0,
    duration_s: DurationOption = None,
    num_requests: NumRequestsOption = None,
    vocab_size: VocabSizeOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    drain_timeout_s: DrainTimeoutOption = 60.0,
    slo: SloOption = "",
    max_lag_ms: MaxLagOption = 10.0,
    json: JsonOption = None,
    save_requests: Annotated[
        Path | None, typer.Option(help="Write a line of JSON per request to this file.")
    ] = None,
    html: HtmlOption = None,
    png: PngOption = None,
    log_level: LogLevelOption = "warning",
) -> None:
    """Play one load against one server and measure it.

    Exit codes: 0; 1: it could not be run, or nothing came through; 3: the generator could not
    keep up, so that the numbers are useless; 130: stopped.
    """
    # Imported here, so that `--help` is fast.
    from loadtest.drills.audit import Auditor
    from loadtest.drills.site import UpOptions, parse_pids
    from loadtest.execute import Job, execute
    from loadtest.report.outputs import Outputs
    from loadtest.search import Search
    from loadtest.steps import Sweep

    codes: list[int] = []

    async def main() -> None:
        steps = Sweep.parse(sweep) if sweep else None
        load = choose_load(rate, arrivals, burstiness, concurrency, think_s, trace, slowdown, steps)
        search = Search(attainment=attainment, repeats=repeats, precision=precision)
        plan = LoadPlan(
            load=load,
            input_lengths=parse_lengths("input_tokens", input_tokens),
            output_lengths=parse_lengths("output_tokens", output_tokens),
            prefix_groups=prefix_groups,
            prefix_tokens=prefix_tokens,
            cancel_rate=cancel_rate,
            turns=parse_lengths("turns", turns),
            turn_pause_s=turn_pause_s,
            dataset=dataset,
            tokenizer=tokenizer,
            seed=fresh_seed() if seed is None else seed,
            warmup_s=warmup_s,
            duration_s=duration_s,
            num_requests=num_requests,
            vocab_size=vocab_size,
            timeout_s=timeout_s,
            drain_timeout_s=drain_timeout_s,
            max_lag_s=max_lag_ms / 1e3,
            slo=Slo.parse(slo),
        )
        if target.tls and up:
            raise ConfigError("tls_cert, tls_ca: are for --target; --up listens on loopback only")
        faults = check_schedule([Fault.parse(text) for text in fault or ()], duration_s)
        job = Job(
            plan=plan,
            up=UpOptions(
                model=up,
                num_prefill=prefill,
                num_decode=decode,
                router_args=tuple(router_args.split()),
                node_args=tuple(node_args.split()),
                admin_token=admin_token,
                can_inject=any(one.act == "inject" for one in faults),
            )
            if up
            else None,
            faults=faults,
            pids=parse_pids(pid or ()),
            auditor=Auditor(admin, admin_token, target.tls) if admin else None,
            options=target,
            outputs=Outputs(json=json, save_requests=save_requests, html=html, png=png),
            sweep=steps,
            search=search if find_max_goodput else None,
        )
        codes.append(await execute(job))

    failed = run_program(main, LogOptions(log_level=log_level))
    raise typer.Exit(failed or codes[0])


app.command()(compare)
