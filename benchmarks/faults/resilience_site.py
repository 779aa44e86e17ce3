"""A router process and a process of simulated nodes, and what the router says of itself.

Knows processes and the admin service; not what a drill is, nor what the load asks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import grpc

from baton.processes.free_address import free_address
from baton.v1 import admin_pb2, admin_pb2_grpc
from benchmarks.runner.environment import DEMO_MODEL

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_KILLED = b" is killed"  # of `SimCluster`'s log


class Site:
    """A deployment as a context manager: all processes run inside the block and end after it.

    Args:
        nodes: options of `baton sim-node`, of its ``num_prefill`` and ``num_decode`` nodes.
    """

    def __init__(self, num_prefill: int, num_decode: int, nodes: list[str]) -> None:
        self.address = free_address()
        counts = ["--prefill", str(num_prefill), "--decode", str(num_decode)]
        self._commands = [
            ["router", "--model", str(DEMO_MODEL), "--listen", self.address, "--http-listen", ""],
            ["sim-node", "--model", str(DEMO_MODEL), "--router", self.address, *counts, *nodes],
        ]
        self._num_pairs = num_prefill * num_decode

    def __enter__(self) -> Site:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        self._logs = [Path(self._folder.name) / name for name in ("router.log", "nodes.log")]
        self._processes: list[subprocess.Popen[bytes]] = []
        for command, log in zip(self._commands, self._logs, strict=True):
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "baton", *command],
                    stderr=stream,
                    cwd=DEMO_MODEL.parents[1],
                )
            self._processes.append(process)
        self._channel = grpc.insecure_channel(self.address)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def wait_ready(self, share: float = 1.0) -> None:
        """Wait until this share of all pairs of nodes reach each other; raise TimeoutError."""
        give_up_at = time.monotonic() + _READY_TIMEOUT_S
        while self._num_connected() < share * self._num_pairs:
            if time.monotonic() > give_up_at:
                raise TimeoutError(self.log_tail())
            time.sleep(0.2)

    def log_tail(self) -> str:
        """Return the ends of both processes' logs."""
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in self._logs)

    def num_deaths(self) -> int:
        """Return how many nodes have died so far."""
        return self._logs[1].read_bytes().count(_KILLED)

    def stats(self) -> admin_pb2.GetStatsResponse:
        stats: admin_pb2.GetStatsResponse = self._admin.GetStats(
            admin_pb2.GetStatsRequest(), timeout=10
        )
        return stats

    def num_open_legs(self) -> int:
        """Return the router's requests on nodes, counted once per node."""
        nodes = self._admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10).nodes
        return sum(node.num_requests for node in nodes)

    def router_rss_mib(self) -> float:
        """Return the router's resident memory in MiB."""
        status = Path(f"/proc/{self._processes[0].pid}/status").read_text(encoding="utf-8")
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    def router_cpu_s(self) -> float:
        """Return the CPU seconds of the router's process."""
        stat = Path(f"/proc/{self._processes[0].pid}/stat").read_text(encoding="utf-8")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _num_connected(self) -> int:
        """Return the number of pairs of nodes that reach each other."""
        try:
            nodes = self._admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10).nodes
        except grpc.RpcError:
            return 0
        connected: int = sum(peer.connected for node in nodes for peer in node.peers)
        return connected // 2
