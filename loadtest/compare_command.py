"""`baton loadtest compare`: its options, and what it does with them."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer
from rich.console import Console

from baton.errors import ConfigError
from baton.process import print_error, run_program, stop_event
from loadtest.compare import NOTATION, Comparison, Deployment, Trial, play_comparison
from loadtest.execute import EXIT_STOPPED, judge, shown
from loadtest.lengths import parse_lengths
from loadtest.options import (
    ArrivalsOption,
    AttainmentOption,
    BurstinessOption,
    DrainTimeoutOption,
    FindMaxGoodputOption,
    HtmlOption,
    InputTokensOption,
    JsonOption,
    LogLevelOption,
    MaxLagOption,
    NodeArgsOption,
    OutputTokensOption,
    PngOption,
    PrecisionOption,
    PrefixGroupsOption,
    PrefixTokensOption,
    RouterArgsOption,
    SeedOption,
    SloOption,
    TimeoutOption,
    VocabSizeOption,
    WarmupOption,
    fresh_seed,
)
from loadtest.outputs import Outputs
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.report import WIDTH, plain
from loadtest.report_compare import comparison_to_json, print_comparison, trial_line
from loadtest.search import Search
from loadtest.site import UpOptions
from loadtest.slo import Slo
from loadtest.targets.base import TargetOptions
from loadtest.verdict import values_of


def parse_cores(text: str) -> tuple[int, ...]:
    """``0-3,6``; empty: all that this process may use. Raises ConfigError."""
    allowed = os.sched_getaffinity(0)
    cores: set[int] = set() if text else set(allowed)
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            cores |= set(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        cores = {-1}
    if not cores or not cores <= allowed:
        raise ConfigError(f"cores: must be like 0-3,6 and of {sorted(allowed)}, got {text!r}")
    return tuple(sorted(cores))


async def execute_comparison(
    comparison: Comparison, options: TargetOptions, outputs: Outputs
) -> int:
    """Returns the exit code; raises BatonError."""
    outputs.check()
    console = Console(width=WIDTH, highlight=False)

    def show(trial: Trial) -> None:
        console.print(trial_line(trial), soft_wrap=True)

    stop = stop_event(asyncio.get_running_loop())
    trials = await play_comparison(comparison, options, stop, show)
    if trials:
        print_comparison(comparison, values_of(comparison.deployments, trials), console)
        outputs.write(plain(comparison_to_json(comparison, trials, shown(options))))
    if stop.is_set():
        print_error("the comparison was stopped before its end")
        return EXIT_STOPPED
    return judge([trial.result for trial in trials])


def compare(
    up: Annotated[str, typer.Option(help="Model folder or hub id, of all deployments.")],
    rate: Annotated[float, typer.Option(help="Requests per second, open loop.")],
    duration_s: Annotated[
        float, typer.Option(help="Of each run, seconds; warm-up included; nothing is sent after.")
    ],
    slo: SloOption,
    deployments: Annotated[
        str, typer.Option(help=f"What is compared, separated by commas: {NOTATION}.")
    ] = "colocated:2,1:1",
    repeats: Annotated[int, typer.Option(help="Runs of each, for confidence intervals.")] = 3,
    find_max_goodput: FindMaxGoodputOption = False,
    attainment: AttainmentOption = 0.9,
    precision: PrecisionOption = 0.1,
    cores: Annotated[
        str, typer.Option(help="That each deployment's nodes divide, like 0-3; all if empty.")
    ] = "",
    node_args: NodeArgsOption = "",
    colocated_args: Annotated[
        str, typer.Option(help="More options of nodes that do both, as one string.")
    ] = "",
    router_args: RouterArgsOption = "",
    arrivals: ArrivalsOption = "poisson",
    burstiness: BurstinessOption = 1.0,
    input_tokens: InputTokensOption = "512",
    output_tokens: OutputTokensOption = "128",
    prefix_groups: PrefixGroupsOption = 0,
    prefix_tokens: PrefixTokensOption = 0,
    seed: SeedOption = None,
    warmup_s: WarmupOption = 0.0,
    vocab_size: VocabSizeOption = 1000,
    timeout_s: TimeoutOption = 600.0,
    drain_timeout_s: DrainTimeoutOption = 60.0,
    max_lag_ms: MaxLagOption = 10.0,
    json: JsonOption = None,
    html: HtmlOption = None,
    png: PngOption = None,
    log_level: LogLevelOption = "warning",
) -> None:
    """Whether to disaggregate, and how: the same requests on the same cores, in each shape.

    Starts each deployment anew for each repeat; with --find-max-goodput once, and compares each
    at the highest rate that it holds. Goodput within --slo decides; what it does to ITL
    and TTFT is told, too. Exit codes as of run.
    """
    codes: list[int] = []

    async def main() -> None:
        plan = LoadPlan(
            load=OpenLoop(rate_per_s=rate, arrivals=arrivals, burstiness=burstiness),
            input_lengths=parse_lengths("input_tokens", input_tokens),
            output_lengths=parse_lengths("output_tokens", output_tokens),
            prefix_groups=prefix_groups,
            prefix_tokens=prefix_tokens,
            seed=fresh_seed() if seed is None else seed,
            warmup_s=warmup_s,
            duration_s=duration_s,
            vocab_size=vocab_size,
            timeout_s=timeout_s,
            drain_timeout_s=drain_timeout_s,
            max_lag_s=max_lag_ms / 1e3,
            slo=Slo.parse(slo),
        )
        search = Search(attainment=attainment, repeats=repeats, precision=precision)
        comparison = Comparison(
            plan=plan,
            deployments=tuple(Deployment.parse(one) for one in deployments.split(",")),
            up=UpOptions(
                model=up,
                router_args=tuple(router_args.split()),
                node_args=tuple(node_args.split()),
                cores=parse_cores(cores),
            ),
            repeats=repeats,
            colocated_args=tuple(colocated_args.split()),
            search=search if find_max_goodput else None,
        )
        outputs = Outputs(json=json, html=html, png=png)
        codes.append(await execute_comparison(comparison, TargetOptions(url=""), outputs))

    failed = run_program(main, log_level=log_level)
    raise typer.Exit(failed or codes[0])
