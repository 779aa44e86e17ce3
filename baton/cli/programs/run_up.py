"""Run a deployment on this machine until the user stops it, and restart processes that die."""

from __future__ import annotations

import collections
import signal
import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.access.tls_options import TlsOptions
from baton.api.errors import ConfigError
from baton.api.printable import printable
from baton.deployment.local_deployment import Child, LocalDeployment, LocalDeploymentConfig
from baton.kernel_library.state import BUILDING, SLOWER

_CHECK_S = 0.5  # seconds between checks that all processes run
_STYLES = {"starting": "yellow", "connecting": "cyan", "ready": "green"}
# If a process ends this many times within this time, restarts do not help, so the deployment ends.
MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
_KEYS = ("--api-keys-file", "--admin-token", "--node-token")


def run_up(config: LocalDeploymentConfig, *, ready_timeout_s: float) -> int:
    """Run a deployment; return the exit code of `baton up`. Raises BatonError."""
    told = False

    def stop(number: int, frame: object) -> None:
        # A variable tells the loop to end, and not an event, because this handler may interrupt
        # code that holds the event's lock.
        nonlocal told
        told = True
        raise KeyboardInterrupt

    # The handlers are set even if SIGINT is ignored from the start, as it is in background jobs of
    # scripts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    console = Console(highlight=False)
    try:
        with LocalDeployment(config, lambda: _say(console, BUILDING)) as deployment:
            try:
                wait_ready(deployment, console, ready_timeout_s)
                _say_ready(deployment, console)
                keeper = _Keeper(deployment, console)
                while not told:
                    time.sleep(_CHECK_S)
                    keeper.check()
            except KeyboardInterrupt:
                console.print(
                    f"stopping: open requests have {config.drain_timeout_s:g} s to end; "
                    "Ctrl-C ends everything at once"
                )
                raise
    except KeyboardInterrupt:
        console.print("stopped")
    return 0


class _Keeper:
    """Restarts processes of a deployment that die, but not too often."""

    def __init__(self, deployment: LocalDeployment, console: Console) -> None:
        self._deployment = deployment
        self._console = console
        self._deaths: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        self._starting: set[str] = set()  # restarted processes that are not ready yet

    def check(self) -> None:
        """Restart processes that have died; raises ConfigError after too many deaths."""
        before = [child.name for child in self._deployment.children]
        for child in self._deployment.ended(may_leave=True):
            self._start_again(child)
        names = [child.name for child in self._deployment.children]
        for name in before:
            if name not in names:
                _say(self._console, f"{name} has left")
        self._starting &= set(names)
        if not self._starting:
            return
        self._deployment.update_states()
        for name in sorted(self._starting):
            child = self._deployment.child(name)
            if child.state == "ready":
                self._starting.remove(name)
                _say(self._console, f"{name} is ready again (pid {child.process.pid})")

    def _start_again(self, child: Child) -> None:
        why = self._deployment.why_ended(child)
        now = time.monotonic()
        deaths = [at for at in self._deaths[child.name] if at > now - RESTARTS_WITHIN_S]
        self._deaths[child.name] = [*deaths, now]
        if len(deaths) >= MAX_RESTARTS:
            raise ConfigError(
                f"{child.name} ended {len(deaths) + 1} times within "
                f"{RESTARTS_WITHIN_S / 60:g} min: {why}"
            )
        _say(self._console, f"{child.name} ended: {why}", style="red")
        _say(self._console, f"{child.name} is started again")
        self._deployment.restart(child.name)
        self._starting.add(child.name)


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a line, in which quotes of processes or files are escaped."""
    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def _say_ready(deployment: LocalDeployment, console: Console) -> None:
    """Print the deployment's addresses and an example call, and notices for the user."""
    config = deployment.config
    tls = _client_options(config.tls_of("client"))
    key = "BATON_API_KEY=KEY " if set(_KEYS) & set(config.router_args) else ""
    at = f"--router {config.listen}{tls}"
    console.print(f'[green]ready[/]  {key}baton generate {at} "def add(a, b):"', soft_wrap=True)
    chat = f'baton chat {at} --system "Answer in one short sentence."'
    console.print(f"       {key}{chat}", soft_wrap=True)
    # If the port is random, only the router's log has its number.
    if config.http_listen and not config.http_listen.endswith(":0"):
        root = f"{'https' if tls else 'http'}://{config.http_listen}"
        console.print(f"       OpenAI API:  {root}/v1", soft_wrap=True)
        console.print(f"       status page: {root}/ui", soft_wrap=True)
    kept = "" if config.log_folder else " (removed at the end, unless something fails)"
    _say(console, f"       logs: {deployment.log_folder}{kept}")
    if deployment.kernels.problem:
        why = deployment.kernels.problem
        _say(console, f"no native kernels: {why}, so {SLOWER}", style="yellow")
        _say(console, f"  {deployment.kernels.advice}", style="yellow")
    console.print("[dim]Ctrl-C stops everything[/]")


def _client_options(tls: TlsOptions) -> str:
    return f" --tls-cert {tls.cert} --tls-key {tls.key} --tls-ca {tls.ca}" if tls else ""


def wait_ready(deployment: LocalDeployment, console: Console, timeout_s: float) -> None:
    """Wait until all nodes are ready, and show their states; raises BatonError."""
    if not console.is_terminal:  # the table is printed at the end
        names = ", ".join(child.name for child in deployment.children)
        _say(console, f"starting {names}")
    with Live(_table(deployment.children), console=console, transient=False) as live:
        try:
            deployment.wait_ready(timeout_s, lambda children: live.update(_table(children)))
        finally:
            if not console.is_terminal:  # the table has no end of line
                live.stop()
                console.print()


def _table(children: list[Child]) -> Table:
    table = Table.grid(padding=(0, 2))
    for child in children:
        style = _STYLES[child.state]
        table.add_row(child.name, f"pid {child.process.pid}", f"[{style}]{child.state}[/]")
    return table
