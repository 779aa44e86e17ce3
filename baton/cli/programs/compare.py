"""`baton loadtest compare`: options and execution."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from baton.api.errors import ConfigError
from baton.cli.programs.loadtest_options import (
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
from baton.processes.process import run_program
from baton.telemetry.log_options import LogOptions
from loadtest.load.lengths import parse_lengths
from loadtest.load.shapes import NOTATION, Deployment
from loadtest.plan import LoadPlan, OpenLoop
from loadtest.slo import Slo


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse cores like ``0-3,6``; empty: all usable ones. Raises ConfigError."""
    allowed = os.sched_getaffinity(0)
    cores: set[int] = set() if text else set(allowed)
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            one, other = int(first), int(last if dash else first)
            cores |= set(range(one, min(other, max(allowed) + 1) + 1))
    except ValueError:
        cores = {-1}
    if not cores or not cores <= allowed:
        raise ConfigError(f"cores: must be like 0-3,6 and of {sorted(allowed)}, got {text!r:.100}")
    return tuple(sorted(cores))


def compare(
    up: Annotated[
        str, typer.Option(help="Model folder, GGUF file, or hub id, of all deployments.")
    ],
    rate: Annotated[float, typer.Option(help="Requests per second, of each deployment.")],
    duration_s: Annotated[
        float, typer.Option(help="Nothing is sent after, seconds, in each run; warm-up included.")
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
    """Compare deployments, disaggregated or not, with the same requests on the same cores.

    Restarts each deployment for each repeat. With --find-max-goodput, starts each only once, and
    compares them at the highest rate that each sustains. Goodput within --slo decides; the effects
    on ITL and TTFT are shown, too. Exit codes are those of run.
    """
    codes: list[int] = []

    async def main() -> None:
        # here, so that `--help` is fast
        from loadtest.compare import Comparison
        from loadtest.drills.site import UpOptions
        from loadtest.execute_comparison import execute_comparison
        from loadtest.report.outputs import Outputs
        from loadtest.search import Search
        from loadtest.targets.base import TargetOptions

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

    failed = run_program(main, LogOptions(log_level=log_level))
    raise typer.Exit(failed or codes[0])
