"""`baton up`: router, prefill and decode nodes on this machine, in one command."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.cli.tls_options import InsecureOption
from baton.client import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS
from baton.errors import BatonError
from baton.local_deployment import Child, LocalDeployment, LocalDeploymentConfig
from baton.process import print_error
from baton.tls import TlsOptions

_STYLES = {"starting": "yellow", "connecting": "cyan", "ready": "green"}


def up(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Model folder or hub id.")],
    prefill: Annotated[int, typer.Option(help="Prefill nodes.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.", min=1)] = 1,
    listen: Annotated[str, typer.Option(help="host:port of the router.")] = DEFAULT_ADDRESS,
    http_listen: Annotated[
        str, typer.Option(help='host:port of the OpenAI-compatible HTTP API; "": none.')
    ] = DEFAULT_HTTP_ADDRESS,
    served_model_name: Annotated[
        str, typer.Option(help="What HTTP clients call the model; as --model if not given.")
    ] = "",
    chat_template: Annotated[
        str,
        typer.Option(help="A Jinja file that is used instead of the checkpoint's chat template."),
    ] = "",
    tool_call_parser: Annotated[
        str,
        typer.Option(help="How the model writes calls of tools; as of `baton router`."),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(help="How the model writes its reasoning; as of `baton router`."),
    ] = "auto",
    policy: Annotated[str, typer.Option(help="Routing policy.")] = "cost",
    dtype: Annotated[str, typer.Option(help="Weights and computation.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV cache: auto (as --dtype) or fp8, half the bytes or less.")
    ] = "auto",
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV memory of each node, such as 2G; auto: measured at start.")
    ] = "auto",
    node_args: Annotated[str, typer.Option(help="More options of every node, as one string.")] = "",
    decode_args: Annotated[
        str, typer.Option(help="More options of every decode node, as one string.")
    ] = "",
    log_folder: Annotated[
        Path | None, typer.Option(help="Where logs go; a temporary folder if not given.")
    ] = None,
    admin_token: Annotated[
        str,
        typer.Option(
            help="That admin calls must bring; none if empty.", envvar="BATON_ADMIN_TOKEN"
        ),
    ] = "",
    tls_folder: Annotated[
        Path | None,
        typer.Option(
            help="Certificates as `baton certs dev` makes them (ca.crt, router.crt, router.key, "
            "p0.crt, d0.crt, operator.crt, ...); then nobody gets in without one. No TLS if not "
            "given."
        ),
    ] = None,
    insecure: InsecureOption = False,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            help="When it is stopped, open requests have so long to end; a second Ctrl-C ends it "
            "at once."
        ),
    ] = 10.0,
    ready_timeout_s: Annotated[float, typer.Option(help="How long to wait for all nodes.")] = 120.0,
) -> None:
    """Start a router, prefill and decode nodes on this machine; Ctrl-C stops all of them.

    The machine's cores are divided between the nodes.
    """
    config = LocalDeploymentConfig(
        model=model,
        listen=listen,
        http_listen=http_listen,
        num_prefill=prefill,
        num_decode=decode,
        router_args=[
            *("--policy", policy, "--served-model-name", served_model_name),
            *("--chat-template", chat_template, "--tool-call-parser", tool_call_parser),
            *("--reasoning-parser", reasoning_parser),
        ],
        node_args=[
            *("--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype),
            *("--kv-cache-memory", kv_cache_memory, *node_args.split()),
        ],
        decode_args=decode_args.split(),
        log_folder=log_folder,
        admin_token=admin_token,
        tls_folder=tls_folder,
        insecure=insecure,
        drain_timeout_s=drain_timeout_s,
    )
    stopping = threading.Event()

    def stop(number: int, frame: object) -> None:
        stopping.set()
        raise KeyboardInterrupt

    # Also where SIGINT is ignored from the start, as for background jobs of a script.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    console = Console()
    try:
        with LocalDeployment(config) as deployment:
            wait_ready(deployment, console, ready_timeout_s)
            tls = _client_options(config.tls_of("client"))
            call = f'baton generate --router {listen}{tls} "def add(a, b):"'
            console.print(f"[green]ready[/]  {call}", soft_wrap=True)
            if http_listen and not http_listen.endswith(":0"):  # else the router's log says it
                scheme = "https" if tls else "http"
                console.print(f"       OpenAI API: {scheme}://{http_listen}/v1")
            console.print("[dim]Ctrl-C stops everything[/]")
            while not stopping.wait(0.5):
                deployment.check(may_leave=True)
    except KeyboardInterrupt:
        console.print("stopped")
    except BatonError as error:
        print_error(error)
        raise typer.Exit(1) from None


def _client_options(tls: TlsOptions) -> str:
    return f" --tls-cert {tls.cert} --tls-key {tls.key} --tls-ca {tls.ca}" if tls else ""


def wait_ready(deployment: LocalDeployment, console: Console, timeout_s: float) -> None:
    """Wait for all nodes, showing each one's state; raises BatonError."""
    with Live(_table(deployment.children), console=console, transient=False) as live:
        deployment.wait_ready(timeout_s, lambda children: live.update(_table(children)))
    if not console.is_terminal:
        console.print()


def _table(children: list[Child]) -> Table:
    table = Table.grid(padding=(0, 2))
    for child in children:
        style = _STYLES[child.state]
        table.add_row(child.name, f"pid {child.process.pid}", f"[{style}]{child.state}[/]")
    return table
