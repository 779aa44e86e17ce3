"""Options shared by the load test's commands, with their help."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.declared import by_name, help_of_option
from loadtest.exit_codes import EXIT_LAGGED
from loadtest.load.lengths import NOTATION
from loadtest.plan import ClosedLoop, LoadPlan, OpenLoop, TraceReplay

MAX_FRESH_SEED = 2**31


def fresh_seed() -> int:
    """Return a random seed, most probably unused so far."""
    return secrets.randbelow(MAX_FRESH_SEED)


def _declared(kind: type[Any], name: str) -> Any:
    """Return a declared option's settings: its help with limits."""
    return typer.Option(help=help_of_option(by_name(kind)[name]))


RateOption = Annotated[float | None, _declared(OpenLoop, "rate")]
ArrivalsOption = Annotated[str, _declared(OpenLoop, "arrivals")]
BurstinessOption = Annotated[float, _declared(OpenLoop, "burstiness")]
ConcurrencyOption = Annotated[int | None, _declared(ClosedLoop, "concurrency")]
ThinkOption = Annotated[float, _declared(ClosedLoop, "think_s")]
SlowdownOption = Annotated[float, _declared(TraceReplay, "slowdown")]
NodeArgsOption = Annotated[str, typer.Option(help="More options of every node, as one string.")]
RouterArgsOption = Annotated[str, typer.Option(help="More options of the router, as one string.")]
InputTokensOption = Annotated[str, typer.Option(help=f"Prompts: {NOTATION}.")]
OutputTokensOption = Annotated[str, typer.Option(help=f"Outputs: {NOTATION}.")]
PrefixGroupsOption = Annotated[int, _declared(LoadPlan, "prefix_groups")]
PrefixTokensOption = Annotated[int, _declared(LoadPlan, "prefix_tokens")]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Same seed, same requests, which a server may have cached; without one every run has "
        "fresh prompts, and the report tells their seed."
    ),
]
TurnsOption = Annotated[
    str,
    typer.Option(
        help=f"Requests of a conversation, each of which goes on from the one before: {NOTATION}."
    ),
]
TurnPauseOption = Annotated[float, _declared(LoadPlan, "turn_pause_s")]
CancelRateOption = Annotated[float, _declared(LoadPlan, "cancel_rate")]
DurationOption = Annotated[float | None, _declared(LoadPlan, "duration_s")]
NumRequestsOption = Annotated[int | None, _declared(LoadPlan, "num_requests")]
WarmupOption = Annotated[float, _declared(LoadPlan, "warmup_s")]
VocabSizeOption = Annotated[int, _declared(LoadPlan, "vocab_size")]
TimeoutOption = Annotated[float, _declared(LoadPlan, "timeout_s")]
DrainTimeoutOption = Annotated[float, _declared(LoadPlan, "drain_timeout_s")]
SloOption = Annotated[
    str, typer.Option(help="What a good request keeps, seconds: ttft=0.5,tpot=0.05,gap=0.2,e2e=10.")
]
MaxLagOption = Annotated[
    float,
    typer.Option(help=f"Exit code {EXIT_LAGGED} if the generator's own lag (p99) is above."),
]
FindMaxGoodputOption = Annotated[
    bool,
    typer.Option(
        "--find-max-goodput",
        help="Search the highest rate that holds --slo for --attainment of the requests, "
        "beginning with --rate; each try has its warm-up and duration.",
    ),
]
AttainmentOption = Annotated[
    float, typer.Option(help="Search: share of requests that must keep the SLO.")
]
PrecisionOption = Annotated[
    float, typer.Option(help="Search: ends when what fails is so much above what holds.")
]
JsonOption = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(help="Write the result to this file as one page with plots (extra: report)."),
]
PngOption = Annotated[
    Path | None, typer.Option(help="Write the page's plots to this folder (extra: report).")
]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]
