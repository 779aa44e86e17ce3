"""Run a deployment on this machine until it is told to stop, and show how it gets on."""

from __future__ import annotations

import signal
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.access.tls_options import TlsOptions
from baton.local_deployment import Child, LocalDeployment, LocalDeploymentConfig

_CHECK_S = 0.5  # whether all processes still run
_STYLES = {"starting": "yellow", "connecting": "cyan", "ready": "green"}


def run_up(config: LocalDeploymentConfig, *, ready_timeout_s: float) -> int:
    """Run it; returns the exit code of `baton up`. Raises BatonError."""
    told = False

    def stop(number: int, frame: object) -> None:
        # No event: whoever waits for it holds its lock for moments, and this runs on that thread.
        nonlocal told
        told = True
        raise KeyboardInterrupt

    # Also where SIGINT is ignored from the start, as for background jobs of a script.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    console = Console()
    try:
        with LocalDeployment(config) as deployment:
            try:
                wait_ready(deployment, console, ready_timeout_s)
                _say_ready(config, console)
                while not told:
                    time.sleep(_CHECK_S)
                    deployment.check(may_leave=True)
            except KeyboardInterrupt:
                console.print(
                    f"stopping: open requests have {config.drain_timeout_s:g} s to end; "
                    "Ctrl-C ends everything at once"
                )
                raise
    except KeyboardInterrupt:
        console.print("stopped")
    return 0


def _say_ready(config: LocalDeploymentConfig, console: Console) -> None:
    tls = _client_options(config.tls_of("client"))
    call = f'baton generate --router {config.listen}{tls} "def add(a, b):"'
    console.print(f"[green]ready[/]  {call}", soft_wrap=True)
    if config.http_listen and not config.http_listen.endswith(":0"):  # else the log says it
        scheme = "https" if tls else "http"
        console.print(f"       OpenAI API: {scheme}://{config.http_listen}/v1")
    console.print("[dim]Ctrl-C stops everything[/]")


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
