"""Site: the server's processes that this load test can kill, stop and restart.

The load test has started these processes itself (`--up`), or was given their process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.api.errors import ConfigError
from baton.deployment.local_deployment import Child, LocalDeployment, LocalDeploymentConfig
from baton.kernel_library.state import BUILDING
from baton.processes.free_address import free_address
from baton.processes.held_folder import HeldFolder
from loadtest.drills.faults import Fault, FaultEvent
from loadtest.load.clock import RunClock

READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of the deployment that the load test starts; see `baton up`.

    Attributes:
        node_args: additional arguments for prefill and decode nodes.
        decode_args, encode_args: additional arguments for nodes of one role.
        cores: cores that the nodes divide, and on which the router also runs; empty: all cores of
            this process.
        lend_cores: whether a node may compute on another node's idle cores.
    """

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    num_encode: int = 0
    router_args: tuple[str, ...] = ()
    node_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    encode_args: tuple[str, ...] = ()
    admin_token: str = field(default="", repr=False)
    can_inject: bool = False
    cores: tuple[int, ...] = ()
    lend_cores: bool = False


class Site:
    """The processes that faults can affect, and the ways to do so.

    Args:
        pids: process ids by name of router or node.
        deployment: the deployment that the load test started; None: it started none.
        fault_files: by node name, the file from which a node reads its faults.
    """

    def __init__(
        self,
        pids: Mapping[str, int],
        deployment: LocalDeployment | None = None,
        fault_files: Mapping[str, Path] | None = None,
    ) -> None:
        self._pids = pids
        self._deployment = deployment
        self._fault_files = fault_files or {}

    @property
    def admin_token(self) -> str:
        """Return the admin token of the deployment started here; empty if none is needed."""
        return self._deployment.admin_token if self._deployment else ""

    def pid(self, name: str) -> int:
        """Return the process id of this router or node."""
        pid = self._pids.get(name)
        if pid is None:
            assert self._deployment is not None
            pid = self._deployment.child(name).process.pid
        return pid

    def check(self, faults: Sequence[Fault]) -> None:
        """Raise ConfigError unless this load test can cause all faults."""
        known = [child.name for child in self._deployment.children] if self._deployment else []
        known += self._pids
        for fault in faults:
            if fault.act in ("inject", "restart") and self._deployment is None:
                raise ConfigError(
                    f"fault: only processes that the load test started (--up) can be made to "
                    f"{fault.act}, got {fault.text!r:.100}"
                )
            if fault.node and fault.node not in known:
                raise ConfigError(
                    f"fault: {fault.node} must be one of {', '.join(known) or 'nobody'} (--up or "
                    f"--pid NAME=PID names them), got {fault.text!r:.100}"
                )
            if fault.act == "inject" and fault.node and fault.node not in self._fault_files:
                raise ConfigError(
                    f"fault: {fault.node} moves no KV blocks, got {fault.text!r:.100}"
                )

    async def do(self, fault: Fault, clock: RunClock) -> FaultEvent:
        """Cause a fault at its time and for its duration; if cancelled, undo it."""
        await clock.sleep_until(fault.begin_s)
        began_s = clock.now_s()
        if fault.act == "kill":
            self._signal(fault.node, signal.SIGKILL)
        elif fault.act == "restart":
            assert self._deployment is not None
            await asyncio.to_thread(self._deployment.restart, fault.node)
        elif fault.act == "stop":
            self._signal(fault.node, signal.SIGSTOP)
            try:
                await clock.sleep_until(fault.end_s)
            finally:
                self._signal(fault.node, signal.SIGCONT)
        else:
            await self._inject(fault, clock)
        return FaultEvent(fault=fault, began_s=began_s, ended_s=clock.now_s())

    async def _inject(self, fault: Fault, clock: RunClock) -> None:
        files = [path for name, path in self._fault_files.items() if fault.node in ("", name)]
        for path in files:
            write_whole(path, fault.spec)
        try:
            await clock.sleep_until(fault.end_s)
        finally:
            for path in files:
                write_whole(path, "")

    def _signal(self, name: str, number: int) -> None:
        """Send a signal to a process; do nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(name), number)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see half of it."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def parse_pids(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts like ``p0=1234``; raises ConfigError for processes that cannot be signalled."""
    pids: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        is_pid = number.isdecimal() and len(number) <= 10 and 2 <= int(number) < 2**31
        if not name or not is_pid:
            raise ConfigError(f"pid: must be NAME=PID, with 2 or more, got {text!r:.100}")
        try:
            os.kill(int(number), 0)
        except OSError as error:
            raise ConfigError(f"pid: {text!r} cannot be signalled: {error.strerror}") from error
        pids[name] = int(number)
    return pids


@contextlib.asynccontextmanager
async def started(options: UpOptions, stop: asyncio.Event) -> AsyncIterator[tuple[Site, str]]:
    """Run a deployment; once it is ready, yield its site and its router's address.

    Raises ConfigError or NodeUnavailableError if the deployment does not start.
    """

    def progress(children: list[Child]) -> None:
        if stop.is_set():
            raise ConfigError("up: stopped before all nodes were ready")

    with HeldFolder("baton-faults-") as folder:
        files = _fault_files(options, folder.path)
        faults = ["--inject-faults", f"@{folder.path}"] if files else []
        config = LocalDeploymentConfig(
            model=options.model,
            listen=free_address(),
            num_prefill=options.num_prefill,
            num_decode=options.num_decode,
            num_encode=options.num_encode,
            router_args=options.router_args,
            node_args=(*options.node_args, *faults),
            decode_args=options.decode_args,
            encode_args=(*options.encode_args, *faults),
            admin_token=options.admin_token,
            lend_cores=options.lend_cores,
        )
        deployment = LocalDeployment(config, _tell_of_build)
        await asyncio.to_thread(_enter_on, deployment, options.cores)
        try:
            await asyncio.to_thread(deployment.wait_ready, READY_TIMEOUT_S, progress)
            yield Site({}, deployment, files), config.listen
        finally:
            await asyncio.to_thread(deployment.stop)


def _tell_of_build() -> None:
    """Print on standard error that kernels are being built, so the start takes long."""
    sys.stderr.write(f"{BUILDING}\n")


def _enter_on(deployment: LocalDeployment, cores: Sequence[int]) -> None:
    """Start the deployment on these cores, to which this thread is bound meanwhile."""
    before = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        deployment.__enter__()
    finally:
        os.sched_setaffinity(0, before)


def _fault_files(options: UpOptions, folder: Path) -> dict[str, Path]:
    if not options.can_inject:
        return {}
    names = [f"p{i}" for i in range(options.num_prefill)]
    names += [f"d{i}" for i in range(options.num_decode)]
    names += [f"e{i}" for i in range(options.num_encode)]
    files = {name: folder / name for name in names}
    for path in files.values():
        path.touch()
    return files
