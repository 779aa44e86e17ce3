"""`baton loadtest`: options of the commands; exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.client_messages import API_KEY_VARIABLE
from baton.errors import ConfigError
from baton.process import print_error, run_program, stop_event
from loadtest.lengths import NOTATION, parse_lengths
from loadtest.page.page import load_figures, write_page, write_pictures
from loadtest.plan import ARRIVALS, ClosedLoop, Load, LoadPlan, OpenLoop, TraceReplay
from loadtest.progress import show_progress
from loadtest.report import (
    WIDTH,
    check_folder,
    check_writable,
    plain,
    print_summary,
    result_to_json,
    write_json,
    write_requests,
)
from loadtest.run import Run, RunResult
from loadtest.slo import Slo
from loadtest.targets import open_target
from loadtest.targets.base import COUNT_TOKENS_BY, TargetOptions

EXIT_NOTHING_CAME = 1
EXIT_LAGGED = 3
EXIT_STOPPED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure a deployment under load.",
)


@app.callback()
def _root() -> None:
    """Keeps the group a group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    json: Path | None
    save_requests: Path | None
    html: Path | None
    png: Path | None

    def check(self) -> None:
        """All can be written, before the run and not after it; raises ConfigError."""
        for name, path in (
            ("json", self.json), ("save_requests", self.save_requests), ("html", self.html),
        ):  # fmt: skip
            if path is not None:
                check_writable(name, path)
        if self.png is not None:
            check_folder("png", self.png)
        if self.html is not None or self.png is not None:
            load_figures()

    def write(self, document: dict[str, Any]) -> None:
        """Raises ConfigError when one cannot be written."""
        if self.json is not None:
            write_json(self.json, document)
        if self.html is not None:
            write_page(self.html, document)
        if self.png is not None:
            write_pictures(self.png, document)


def choose_load(
    rate: float | None,
    arrivals: str,
    burstiness: float,
    concurrency: int | None,
    think_s: float,
    trace: Path | None,
    slowdown: float,
) -> Load:
    """The one that was asked for; raises ConfigError."""
    if sum(option is not None for option in (rate, concurrency, trace)) != 1:
        raise ConfigError("rate, concurrency, trace: exactly one of them must be given")
    if rate is not None:
        return OpenLoop(rate_per_s=rate, arrivals=arrivals, burstiness=burstiness)
    if concurrency is not None:
        return ClosedLoop(concurrency=concurrency, think_s=think_s)
    assert trace is not None
    return TraceReplay(path=trace, slowdown=slowdown)


async def execute(plan: LoadPlan, options: TargetOptions, outputs: _Outputs) -> int:
    """Run, report, and say how it went as an exit code; raises BatonError."""
    outputs.check()
    stop = stop_event(asyncio.get_running_loop())
    target = await open_target(options)
    try:
        run = Run(plan, target)
        showing = asyncio.create_task(show_progress(plan, run.player, Console(stderr=True)))
        try:
            result = await run.execute(stop)
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing
    finally:
        await target.close()
    print_summary(result, Console(width=WIDTH, highlight=False))
    outputs.write(plain(result_to_json(result, shown(options))))
    if outputs.save_requests is not None:
        write_requests(outputs.save_requests, result)
    return judge(result)


def shown(options: TargetOptions) -> dict[str, Any]:
    """What reports say of how the server was talked to."""
    fields = dataclasses.asdict(options)
    del fields["api_key"]
    return fields


def judge(result: RunResult) -> int:
    """The exit code, and a line for each that is not 0."""
    summary = result.summary
    if result.was_stopped:
        print_error("the run was stopped before its end")
        return EXIT_STOPPED
    if not summary.lag.kept_up:
        print_error(
            "the generator did not keep up: its own lag is part of these latencies. Use a less "
            "busy machine, less load, or a higher --max-lag-ms"
        )
        return EXIT_LAGGED
    if not summary.num_ok and not summary.num_cancelled:
        print_error("no request of the measured window came through")
        return EXIT_NOTHING_CAME
    return 0


@app.command()
def run(
    target: Annotated[
        str,
        typer.Option(help="grpc://host:port (Baton) or http://host:port/v1 (OpenAI completions)."),
    ],
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, whatever the answers do.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help=f"Open loop: {', '.join(ARRIVALS)}.")] = "poisson",
    burstiness: Annotated[
        float,
        typer.Option(help="Gamma arrivals: standard deviation of the gaps over their mean."),
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: users who wait for their answers.")
    ] = None,
    think_s: Annotated[
        float, typer.Option(help="Closed loop: mean pause before the next request, exponential.")
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option(help="Replay: a file in the format of Mooncake's traces.")
    ] = None,
    slowdown: Annotated[float, typer.Option(help="Replay: times are multiplied by this.")] = 1.0,
    input_tokens: Annotated[str, typer.Option(help=f"Prompts: {NOTATION}.")] = "512",
    output_tokens: Annotated[str, typer.Option(help=f"Outputs: {NOTATION}.")] = "128",
    prefix_groups: Annotated[
        int, typer.Option(help="Prompts are of so many groups that begin alike; 0: none do.")
    ] = 0,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens of a group's beginning, before those of --input-tokens.")
    ] = 0,
    cancel_rate: Annotated[
        float, typer.Option(help="Share of requests that the client gives up on the way.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    warmup_s: Annotated[
        float, typer.Option(help="What is scheduled before is not measured, seconds.")
    ] = 0.0,
    duration_s: Annotated[
        float | None, typer.Option(help="Nothing is sent after, seconds; warm-up included.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(help="Send at most so many.")] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Prompts are made of the token ids below this.")
    ] = 1000,
    timeout_s: Annotated[float, typer.Option(help="Of one request, seconds.")] = 600.0,
    drain_timeout_s: Annotated[
        float, typer.Option(help="What has no answer so long after the last is sent is given up.")
    ] = 60.0,
    slo: Annotated[
        str, typer.Option(help="What a good request keeps, seconds: ttft=0.5,tpot=0.05,e2e=10.")
    ] = "",
    max_lag_ms: Annotated[
        float,
        typer.Option(help=f"Exit code {EXIT_LAGGED} if the generator's own lag (p99) is above."),
    ] = 10.0,
    model: Annotated[
        str, typer.Option(help="HTTP: name of the model; the first that is listed if empty.")
    ] = "",
    api_key: Annotated[
        str, typer.Option(help="That the server wants; in no report.", envvar=API_KEY_VARIABLE)
    ] = "",
    connections: Annotated[int, typer.Option(help="gRPC: calls are spread over so many.")] = 1,
    count_tokens_by: Annotated[
        str,
        typer.Option(
            help=f"HTTP: ask for what tells how many tokens a frame has: "
            f"{', '.join(COUNT_TOKENS_BY)} (ask for nothing, take what comes)."
        ),
    ] = "auto",
    include_receipt: Annotated[
        bool, typer.Option("--include-receipt", help="HTTP: ask for Baton's receipts.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    save_requests: Annotated[
        Path | None, typer.Option(help="Write a line of JSON per request to this file.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the result to this file as one page with plots (extra: report)."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write the page's plots to this folder (extra: report).")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Play one load against one server and measure it.

    Exit codes: 0; 1: it could not be run, or nothing came through; 3: the generator could not
    keep up, so that the numbers say nothing; 130: stopped.
    """
    codes: list[int] = []

    async def main() -> None:
        plan = LoadPlan(
            load=choose_load(rate, arrivals, burstiness, concurrency, think_s, trace, slowdown),
            input_lengths=parse_lengths("input_tokens", input_tokens),
            output_lengths=parse_lengths("output_tokens", output_tokens),
            prefix_groups=prefix_groups,
            prefix_tokens=prefix_tokens,
            cancel_rate=cancel_rate,
            seed=seed,
            warmup_s=warmup_s,
            duration_s=duration_s,
            num_requests=num_requests,
            vocab_size=vocab_size,
            timeout_s=timeout_s,
            drain_timeout_s=drain_timeout_s,
            max_lag_s=max_lag_ms / 1e3,
            slo=Slo.parse(slo),
        )
        options = TargetOptions(
            url=target,
            api_key=api_key,
            model=model,
            connections=connections,
            count_tokens_by=count_tokens_by,
            include_receipt=include_receipt,
        )
        outputs = _Outputs(json=json, save_requests=save_requests, html=html, png=png)
        codes.append(await execute(plan, options, outputs))

    failed = run_program(main, log_level=log_level)
    raise typer.Exit(failed or codes[0])


if __name__ == "__main__":
    app(prog_name="baton loadtest")
