"""Options that several commands have, with their help."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from loadtest.exit_codes import EXIT_LAGGED
from loadtest.load.lengths import NOTATION
from loadtest.plan import ARRIVALS

MAX_FRESH_SEED = 2**31


def fresh_seed() -> int:
    """Draw a seed that most probably no run has had."""
    return secrets.randbelow(MAX_FRESH_SEED)


ArrivalsOption = Annotated[str, typer.Option(help=f"Open loop: {', '.join(ARRIVALS)}.")]
BurstinessOption = Annotated[
    float,
    typer.Option(help="Gamma arrivals: standard deviation of the gaps over their mean."),
]
NodeArgsOption = Annotated[str, typer.Option(help="More options of every node, as one string.")]
RouterArgsOption = Annotated[str, typer.Option(help="More options of the router, as one string.")]
InputTokensOption = Annotated[str, typer.Option(help=f"Prompts: {NOTATION}.")]
OutputTokensOption = Annotated[str, typer.Option(help=f"Outputs: {NOTATION}.")]
PrefixGroupsOption = Annotated[
    int, typer.Option(help="Prompts are of so many groups that begin alike; 0: none do.")
]
PrefixTokensOption = Annotated[
    int, typer.Option(help="Tokens of a group's beginning, before those of --input-tokens.")
]
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
TurnPauseOption = Annotated[
    float,
    typer.Option(help="Mean pause between an answer and the next turn, seconds, exponential."),
]
WarmupOption = Annotated[
    float, typer.Option(help="What is scheduled before is not measured, seconds.")
]
VocabSizeOption = Annotated[int, typer.Option(help="Prompts are made of the token ids below this.")]
TimeoutOption = Annotated[float, typer.Option(help="Of one request, seconds.")]
DrainTimeoutOption = Annotated[
    float, typer.Option(help="What has no answer so long after the last is sent is given up.")
]
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
