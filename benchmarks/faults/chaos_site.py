"""Site: a deployment with processes to kill, stop, restart and inspect.

Refuses to know: drills, what clients ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import psutil

from baton.api.errors import BatonError
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from baton.processes.held_folder import abandoned_folders
from baton.v1 import admin_pb2
from benchmarks.faults.chaos_load import NO_ADAPTERS
from benchmarks.runner.answers import Case
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import admin_of
from engine.executors.multiproc import RANKS_PREFIX

READY_TIMEOUT_S = 60.0
FREE_TIMEOUT_S = 10.0  # blocks must be free after this time; the promise is "within seconds"
DETECTION_TIMEOUT_S = 2.0  # limit until the router notices a dead or stopped node
STOP_S = 5.0
ORPHAN_TIMEOUT_S = 3.0  # limit from a process's death to the end of its node's other processes


def demo_deployment(num_decode: int, node_args: Sequence[str] = ()) -> LocalDeploymentConfig:
    """Return a config of two prefill nodes and ``num_decode`` decode nodes with small KV caches.

    Args:
        node_args: additional arguments of each node.
    """
    room = ["--dtype", "float32", "--num-blocks", "600", "--max-num-requests", "32"]
    return LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=2,
        num_decode=num_decode,
        router_args=["--no-local-prefill"],
        node_args=[*room, *node_args],
    )


class Site:
    """One deployment, its requests, and the faults that can be caused in it.

    Args:
        adapters: folders of the nodes' adapters, by name; empty: they have none.
    """

    def __init__(
        self,
        deployment: LocalDeployment,
        cases: list[Case],
        seed: int,
        adapters: Mapping[str, Path] = NO_ADAPTERS,
    ) -> None:
        self.deployment = deployment
        self.address = deployment.config.listen
        self.cases, self.adapters = cases, adapters
        self.draw = random.Random(seed)
        self.doomed: set[str] = set()  # nodes that this drill kills
        self.detection_s: float | None = None
        self.undetected: list[str] = []

    async def stand_still(self, name: str, stop_s: float) -> None:
        """Stop a process for a while, then let it continue."""
        process = self.deployment.child(name).process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(stop_s)
        finally:
            process.send_signal(signal.SIGCONT)

    async def some_time(self, low_s: float = 0.5, high_s: float = 2.5) -> None:
        await asyncio.sleep(self.draw.uniform(low_s, high_s))

    async def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and measure how long the router takes to notice."""
        self.doomed.add(name)
        self.deployment.child(name).process.kill()
        await self.watch_detection(name)

    async def end_rank(self, name: str, which: int, number: signal.Signals) -> None:
        """Send a signal to one rank of a node (0: the leader); the whole node must end."""
        self.doomed.add(name)
        processes = ranks_of(self.deployment.child(name).process.pid)
        os.kill(processes[which], number)
        begin = time.monotonic()
        await self.watch_detection(name)
        while any(map(is_running, processes)):
            if time.monotonic() > begin + ORPHAN_TIMEOUT_S:
                left = [pid for pid in processes if is_running(pid)]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise BatonError(f"{len(left)} processes of {name} were left behind")
            await asyncio.sleep(0.02)

    async def stop(self, name: str) -> None:
        """Stop a process with SIGSTOP for a while."""
        await asyncio.gather(self.stand_still(name, STOP_S), self.watch_detection(name))

    async def watch_detection(self, name: str) -> None:
        if name == "router":
            return
        begin = time.monotonic()
        while time.monotonic() < begin + DETECTION_TIMEOUT_S:
            nodes = await asyncio.to_thread(list_nodes, self.address)
            if nodes is not None and name not in nodes:
                self.detection_s = max(self.detection_s or 0.0, time.monotonic() - begin)
                return
            await asyncio.sleep(0.02)
        self.undetected.append(name)

    async def restart(self, name: str, *more_arguments: str) -> None:
        """Start a node again, with its old address."""
        nodes = await asyncio.to_thread(list_nodes, self.address) or {}
        listen = [] if name == "router" else ["--listen", nodes.get(name) or free_address()]
        await asyncio.to_thread(self.deployment.restart, name, *listen, *more_arguments)
        self.doomed.discard(name)

    async def wait_ready(self) -> None:
        await asyncio.to_thread(self.deployment.wait_ready, READY_TIMEOUT_S)

    async def repair(self) -> None:
        """Restart the processes that have ended, and wait until all nodes are connected."""
        for child in list(self.deployment.children):
            if child.process.poll() is not None:
                await self.restart(child.name)
        await self.wait_ready()


async def wait_until_free(site: Site) -> tuple[float | None, str]:
    """Wait until all blocks are free; return the seconds, or which blocks stay held."""
    begin = time.monotonic()
    while True:
        alive = {c.name for c in site.deployment.children if c.process.poll() is None}
        held = await asyncio.to_thread(held_blocks, site.address, alive - {"router"})
        if not held:
            return time.monotonic() - begin, ""
        if time.monotonic() > begin + FREE_TIMEOUT_S:
            return None, held
        await asyncio.sleep(0.05)


def held_blocks(router: str, alive: set[str]) -> str:
    """Describe blocks in use, and living nodes that have not joined; empty: there are none."""
    nodes = list_nodes(router) or {}
    found = [f"{name} has not joined" for name in sorted(alive - nodes.keys())]
    for name in nodes:
        try:
            with admin_of(router) as admin:
                answer = admin.ListNodeRequests(admin_pb2.NodeRequest(node=name), timeout=2)
        except grpc.RpcError as error:
            found.append(f"{name} does not answer: {error.code().name}")
            continue
        if answer.requests or answer.num_free_blocks != answer.num_blocks:
            states = {f"{one.status}/{one.transfer_state}" for one in answer.requests}
            found.append(
                f"{name} {answer.num_blocks - answer.num_free_blocks} blocks "
                f"({answer.num_quarantined_blocks} in quarantine), "
                f"{len(answer.requests)} requests {' '.join(sorted(states))}".strip()
            )
    return "; ".join(found)


def list_nodes(router: str) -> dict[str, str] | None:
    """Return {name: address} of the router's nodes; None if the router does not answer."""
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=2).nodes
    except grpc.RpcError:
        return None
    return {node.node_name: node.address for node in nodes if not node.lost}


def ranks_of(node: int) -> list[int]:
    """Return the process ids of all ranks of the node whose leader is process ``node``."""
    others = []
    for child in psutil.Process(node).children():
        with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
            if "engine.executors.rank_process" in child.cmdline():
                others.append(child.pid)
    return [node, *sorted(others)]


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_behind() -> set[str]:
    """List the shared-memory files and rendezvous folders of ended processes."""
    return {str(path) for path in (*Path("/dev/shm").iterdir(), *abandoned_folders(RANKS_PREFIX))}


def change_adapters(router: str, method: str, **fields: str) -> None:
    """Call `LoadAdapter` or `UnloadAdapter`; raise BatonError if the router refuses."""
    kind = {
        "LoadAdapter": admin_pb2.AdminLoadAdapterRequest,
        "UnloadAdapter": admin_pb2.AdminUnloadAdapterRequest,
    }[method]
    try:
        with admin_of(router) as admin:
            getattr(admin, method)(kind(**fields), timeout=60)
    except grpc.RpcError as error:
        raise BatonError(f"{method}: {error.code().name}: {error.details()}") from error


def flush_caches(router: str) -> None:
    """Empty all nodes' prefix caches; raise BatonError if a node refuses."""
    try:
        with admin_of(router) as admin:
            nodes = admin.FlushCache(admin_pb2.AdminFlushCacheRequest(), timeout=10).nodes
    except grpc.RpcError as error:
        raise BatonError(f"caches are not flushed: {error.code().name}") from error
    for node in nodes:
        if node.problem:
            raise BatonError(f"{node.node_name}'s cache is not flushed: {node.problem}")
