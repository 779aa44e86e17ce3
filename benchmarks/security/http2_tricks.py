"""Attack a real system with hostile HTTP/2 frames: each of the tricks over 8 connections.

    python -m benchmarks http2_tricks [--seconds 2] [--mixed 60] [--only TEXT]

A router, a prefill node, a decode node and the attackers run in separate processes. Attackers have
a low priority, because attackers on a network could not take cores from the system. Each trick goes
to the router's gRPC port and to a decode node's port for some seconds; then all tricks run at once.
Meanwhile a probe asks for the router's /health, and another client streams outputs. The goals are
those of `hostile_shapes.py`; also, no link between router and node may be lost. Rows that miss a
goal are printed, and make the exit code 1. `starved_ms` is the time for which a program's main
thread waited for a core; on a machine without spare cores, this wait alone makes goals fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.deployment.local_deployment import LocalDeployment
from baton.v1 import admin_pb2, types_pb2
from benchmarks.runner.deployments import deployed
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Document, Run
from benchmarks.security.hostile_shapes import GOALS, Watch, watching, worst_of
from benchmarks.security.http2_attack import NUM_CONNECTIONS
from tests.fakes.network.http2_tricks import TRICKS

ATTACK = ("-m", "benchmarks", "--call", "benchmarks.security.http2_attack:attack_port")
# Seconds after the attackers' end for which a row still counts events.
SETTLE_S = 0.3
_LOST = (" lost", "went away", "quarantine")


@dataclass
class Outcome:
    """The worst figures during one trick, or during all tricks at once."""

    name: str
    port: str
    health_ms: float
    gap_ms: float
    growth_mib: float
    grown: str
    sent_mib: float
    num_connections: int
    lost: list[str]
    starved_ms: float
    failed: list[str]

    def misses(self) -> list[str]:
        """Return the names of the missed goals."""
        goals = [goal for goal in ("health_ms", "gap_ms", "growth_mib")
                 if getattr(self, goal) > GOALS[goal]]  # fmt: skip
        return goals + ["lost"] * bool(self.lost) + ["failed"] * bool(self.failed)


def start_attack(address: str, number: int | None, seconds: float) -> subprocess.Popen[bytes]:
    part = "all" if number is None else str(number)
    command = [sys.executable, *ATTACK, address, part, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


# ---------------------------------------------------------------- what is measured


def lost_lines(folder: Path) -> list[str]:
    """Return the programs' log lines about a lost link or a quarantined request."""
    logs = sorted(folder.glob("*.log"))
    lines = [f"{log.stem}: {one}" for log in logs for one in log.read_text("utf-8").splitlines()]
    return [line for line in lines if any(word in line for word in _LOST)]


def cpu_waits(deployment: LocalDeployment) -> dict[str, float]:
    """Return the seconds that each program's main thread has waited for a core so far."""
    waits = {"": 0.0}
    for child in deployment.children:
        pid = child.process.pid
        with contextlib.suppress(OSError):  # not Linux, or the program has ended
            stat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text("ascii")
            waits[child.name] = int(stat.split()[1]) / 1e9
    return waits


async def measure(
    watch: Watch,
    folder: Path,
    name: str,
    addresses: dict[str, str],
    number: int | None,
    seconds: float,
) -> Outcome:
    """Attack these ports at the same time; return the worst figures."""
    lost = set(lost_lines(folder))
    waited = cpu_waits(watch.deployment)
    watch.begin()
    attackers = [start_attack(address, number, seconds) for address in addresses.values()]
    try:
        answers = [
            await asyncio.to_thread(one.communicate, timeout=seconds + 60) for one in attackers
        ]
    finally:
        for one in attackers:
            one.kill()
    await asyncio.sleep(SETTLE_S)
    starved = {name: s - waited.get(name, s) for name, s in cpu_waits(watch.deployment).items()}
    sent = [json.loads(out) if out else {"bytes": 0, "connections": 0} for out, _ in answers]
    held = watch.held
    grown = max(held.growth_mib, key=lambda one: held.growth_mib[one], default="")
    return Outcome(
        name, " and ".join(addresses), round(held.health_ms, 1), round(held.gap_ms, 1),
        round(held.growth_mib.get(grown, 0.0), 1), grown,
        round(sum(one["bytes"] for one in sent) / 2**20, 1),
        sum(one["connections"] for one in sent),
        [line for line in lost_lines(folder) if line not in lost],
        round(1000 * max(starved.values()), 1), list(held.failed),
    )  # fmt: skip


def node_address(router: str) -> str:
    """Return the address of a decode node's gRPC server."""
    with admin_of(router) as admin:
        nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=10).nodes
    return next(str(node.address) for node in nodes if node.role == types_pb2.NODE_ROLE_DECODE)


async def run_all(
    deployment: LocalDeployment, url: str, folder: Path, options: Options
) -> tuple[list[Outcome], Outcome]:
    ports = {"router": deployment.config.listen, "node": node_address(deployment.config.listen)}
    outcomes = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        missed = outcome.misses()
        print(f"{'misses ' + ', '.join(missed) if missed else 'held'}: {outcome}", flush=True)

    async with watching(deployment, url) as watch:
        await asyncio.sleep(3)
        quiet = await measure(watch, folder, "nothing", {}, None, 0)
        watch.begin()
        await asyncio.sleep(4)
        quiet.health_ms, quiet.gap_ms = round(watch.held.health_ms, 1), round(watch.held.gap_ms, 1)
        print(f"without any: {quiet}", flush=True)
        for number, trick in enumerate(TRICKS):
            if options.only in trick.name:
                note(await measure(watch, folder, trick.name, ports, number, options.seconds))
        if options.mixed:
            note(await measure(watch, folder, "all of them", ports, None, options.mixed))
    return outcomes, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which tricks to send, and how long.

    Attributes:
        seconds: seconds of each trick.
        mixed: seconds for which all tricks are sent at once; 0: they are not.
        only: part of the names of the tricks to send.
        logs: folder for the programs' logs.
    """

    seconds: float = 2.0
    mixed: float = 60.0
    only: str = ""
    logs: str = ""


def run(run: Run, options: Options) -> Document:
    """Attack a system with every trick."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(options.logs or name)
        folder.mkdir(parents=True, exist_ok=True)
        with deployed(
            with_http=True, log_folder=folder, router_args=["--served-model-name", "demo"]
        ) as deployment:
            url = f"http://{deployment.config.http_listen}"
            outcomes, quiet = asyncio.run(run_all(deployment, url, folder, options))
    failed = [one.name for one in outcomes if one.misses()]
    run.problems += [f"{name} misses a goal" for name in failed]
    worst = worst_of(outcomes)
    print(f"{len(outcomes)} rows, {len(failed)} miss a goal; worst {worst}")
    return {
        "goals": GOALS, "failed": failed, "worst": worst, "num_connections": NUM_CONNECTIONS,
        "seconds": options.seconds, "mixed_s": options.mixed,
        "without_them": asdict(quiet), "rows": [asdict(one) for one in outcomes],
    }  # fmt: skip
