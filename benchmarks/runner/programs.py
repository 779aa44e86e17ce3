"""Starts Baton's programs and simulated nodes as processes, and queries a router.

Refuses to know: what is measured with the processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from baton.access.tls import NO_TLS, TlsOptions, read_tls
from baton.processes.free_address import free_address
from baton.serving.rpc import open_sync_channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from benchmarks.runner.environment import DEMO_MODEL, ROOT
from benchmarks.runner.own_process import own_environment

READY_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 20.0


@contextmanager
def admin_of(address: str, tls: TlsOptions = NO_TLS) -> Iterator[Any]:
    """Yield the stub of a router's admin service."""
    with open_sync_channel(address, read_tls(tls)) as channel:
        yield admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated


class LoggedPrograms(Protocol):
    """Running programs that `wait_until_ready` watches."""

    @property
    def processes(self) -> Mapping[str, object]: ...

    def ended(self) -> Sequence[str]:
        """Return the names of the programs that have ended."""

    def log(self, name: str) -> str: ...


def count_pairs(router: str) -> int:
    """Return the number of connected pairs of nodes; 0 while the router does not answer."""
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10).nodes
    except grpc.RpcError:
        return 0
    num_connected: int = sum(peer.connected for node in nodes for peer in node.peers)
    return num_connected // 2


def wait_until_ready(
    programs: LoggedPrograms, is_ready: Callable[[], bool], timeout_s: float
) -> None:
    """Wait until ``is_ready`` returns true.

    Raises TimeoutError with the programs' logs if a program has ended, or after ``timeout_s``.
    """
    give_up_at = time.monotonic() + timeout_s
    while not is_ready():
        if programs.ended() or time.monotonic() > give_up_at:
            raise TimeoutError("\n".join(programs.log(n)[-2000:] for n in programs.processes))
        time.sleep(0.1)


class Programs:
    """Baton's programs as processes, each with a name and a log; they end with the `with` block.

    Args:
        core: core on which all programs run; None: any core.
        variables: additional environment variables.
    """

    def __init__(self, core: int | None = None, **variables: str) -> None:
        # Without preexec_fn: it would make Popen fork this process, and gRPC's threads could then
        # hang for ever.
        pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
        self._command = [*pinned, sys.executable, "-m", "baton"]
        self._environment = own_environment(**variables)
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def start(self, name: str, *words: object) -> None:
        """Start `baton` with these arguments, as the program ``name``."""
        command = [*self._command, *map(str, words)]
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=self._environment
            )

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def ended(self) -> list[str]:
        """Return the names of the programs that have ended."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def log(self, name: str) -> str:
        """Return all that a program has printed so far, over all its starts."""
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"


class SimFleet(Programs):
    """A router process, and a process that runs all simulated nodes.

    Args:
        words: additional options of `baton sim-node`.
        router_words: additional options of `baton router`.
    """

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        *words: object,
        model: Path = DEMO_MODEL,
        router_words: Sequence[str] = ("--http-listen", ""),
        core: int | None = None,
    ) -> None:
        super().__init__(core)
        self.address = free_address()
        self._num_pairs = num_prefill * num_decode
        counts = ("--prefill", num_prefill, "--decode", num_decode)
        self.start("router", "router", "--model", model, "--listen", self.address, *router_words)
        self.start("nodes", "sim-node", "--model", model, "--router", self.address, *counts, *words)

    def wait_ready(self, share: float = 1.0) -> None:
        """Wait until this share of all node pairs is connected; raise TimeoutError if late."""
        wanted = share * self._num_pairs
        wait_until_ready(self, lambda: count_pairs(self.address) >= wanted, READY_TIMEOUT_S)

    def nodes(self) -> Sequence[Any]:
        """Return the router's descriptions of its nodes, from its admin service."""
        with admin_of(self.address) as admin:
            found: Sequence[Any] = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10).nodes
        return found
