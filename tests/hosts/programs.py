"""Baton's programs on the hosts of a network, each with a log; they end with the `with` block.

Logs and dumps of a program are on its host's small disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.hosts.network import Network

ROUTER_PORT, NODE_PORT = 50051, 50060
READY_TIMEOUT_S, STOP_TIMEOUT_S, COMMAND_TIMEOUT_S = 90.0, 20.0, 60.0
_BATON = (sys.executable, "-m", "baton")


class HostPrograms:
    """Programs on hosts, by name; a node has the name of its host.

    Args:
        variables: additional environment variables of all programs.
    """

    def __init__(self, network: Network, variables: Mapping[str, str] | None = None) -> None:
        self.network = network
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._places: dict[str, str] = {}  # host on which each program was last started
        # By default, UCX listens only on loopback. UCX may use other ways than TCP here, as on real
        # machines: the hosts' namespaces must hide that the hosts share a kernel.
        self._environment = {
            **os.environ, "UCX_NET_DEVICES": "eth0", "COLUMNS": "200", "OMP_WAIT_POLICY": "PASSIVE",
            "BATON_DUMP_FOLDER": "/mnt", **(variables or {}),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in reversed(self.processes):
            self.signal(name, signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes.values():
            try:
                process.wait(max(0.1, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # ------------------------------------------------------------------ programs

    @property
    def router(self) -> str:
        """Address of the router."""
        return self.network.at("router", ROUTER_PORT)

    def start(
        self,
        host: str,
        *words: object,
        name: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the command `baton WORDS` on a host, with additional environment variables.

        Args:
            name: the program's name; empty: the host's name.
        """
        name = name or host
        self._places[name] = host
        command = self.network.command(host, *_BATON, *words)
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**self._environment, **(variables or {})},
                start_new_session=True,
            )  # fmt: skip

    def start_router(
        self,
        *words: object,
        model: Path = DEMO_MODEL,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start the router, with additional environment variables, on the host "router"."""
        self.start("router", "router", "--model", model, "--listen", self.router,
                   "--http-listen", "", "--insecure", *words, variables=variables)  # fmt: skip

    def start_node(
        self,
        name: str,
        *words: object,
        host: str = "",
        model: Path = DEMO_MODEL,
        router: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node; a node whose name begins with p computes prompts.

        Args:
            host: the node's host; empty: the host with the node's name.
            router: the router's address; empty: the address of the host "router".
            variables: additional environment variables of this node.
        """
        role, host = "prefill" if name.startswith("p") else "decode", host or name
        self.start(host, role, "--model", model, "--router", router or self.router,
                   "--name", name, "--listen", self.network.at(host, NODE_PORT), "--insecure",
                   "--num-threads", "1", *words, name=name, variables=variables)  # fmt: skip

    def run(self, host: str, *words: object, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a `baton` command on a host; return what it prints, or raise AssertionError."""
        result = subprocess.run(
            self.network.command(host, *_BATON, *words),
            env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        return result.stdout + result.stderr

    def pids(self, name: str) -> list[int]:
        """Return the program's process ids, without the `nsenter` process that started it."""
        process = self.processes[name]
        if process.poll() is not None:
            return []
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a program itself, if it still runs."""
        for pid in self.pids(name):
            os.kill(pid, number)

    def kill(self, name: str) -> None:
        """Kill a program; do nothing if it has ended by itself."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return the output of all of a program's starts on its present host."""
        return self._log(name).read_text(errors="replace")

    def ended(self) -> list[str]:
        """Return the names of programs that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def _log(self, name: str) -> Path:
        return self.network.hosts[self._places[name]].disk / f"{name}.log"
