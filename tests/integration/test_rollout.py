"""A rollout with real processes under load: no request fails, no pair is mixed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.api.errors import BatonError
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.processes.child_processes import PYTHON_MODULE
from baton.processes.free_address import free_address
from baton.serving.rpc import open_sync_channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

logger = logging.getLogger(__name__)
# (Processes that import torch, one after the other, on a machine that may be busy.)
pytestmark = [pytest.mark.large, pytest.mark.timeout(1500)]

OLD, NEW = "2026-11", "2026-12"
PATIENCE_S = 300.0  # eight processes that import torch, on a machine that may be busy
# Another layout: nodes of these would not understand each other's blocks.
LAYOUT = {OLD: "16", NEW: "32"}
PROMPTS = ("def add(a, b):\n", "class Node:\n    def __init__(self):\n")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@dataclass
class Fleet:
    """A router, and nodes that come and go by hand."""

    folder: Path
    router: str = field(default_factory=free_address)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> None:
        command = [*PYTHON_MODULE, "baton", *arguments, "--model", str(DEMO_MODEL)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    def start_node(self, role: str, number: int, revision: str) -> None:
        name = f"{role[0]}{number}-{revision}"
        self.start(
            name, role, "--router", self.router, "--name", name, "--revision", revision,
            "--block-size", LAYOUT[revision], "--dtype", "float32", "--drain-timeout-s", "60",
            "--num-blocks", str(4096 // int(LAYOUT[revision])),
        )  # fmt: skip

    def end_node(self, name: str) -> None:
        """End a node as an update does: SIGTERM, then exit code 0 when it is drained."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, (self.folder / f"{name}.log").read_text()

    def admin(self, *arguments: str) -> Any:
        command = [*PYTHON_MODULE, "baton", "admin", *arguments, "--router", self.router]
        out = subprocess.check_output(
            [*command, "--output", "json"], timeout=60, stderr=subprocess.DEVNULL
        )
        return json.loads(out)

    def rollout(self) -> dict[str, Any]:
        """Return the facts of `baton admin rollout status` without starting a process."""
        with open_sync_channel(self.router) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            found = stub.GetRollout(admin_pb2.GetRolloutRequest(), timeout=20)
        return {"state": found.state, **{one.revision: one for one in found.revisions}}

    def num_pairs(self) -> int:
        """Pairs that complete revisions have of nodes that are here and do not drain."""
        with open_sync_channel(self.router) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            nodes = stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=20).nodes
        here = Counter(
            (one.revision, one.role) for one in nodes if not (one.lost or one.beat.serving_state)
        )
        return sum(min(here[revision, 1], here[revision, 2]) for revision in (OLD, NEW))

    def wait_for(self, revision: str, num_prefill: int, num_decode: int) -> None:
        def is_there() -> bool:
            one = self.rollout().get(revision)
            return one is not None and (one.num_prefill, one.num_decode) == (
                num_prefill,
                num_decode,
            )

        until(is_there, f"{revision} complete")

    def answers(self) -> bool:
        """Whether there is a router."""
        with contextlib.suppress(grpc.RpcError):
            return bool(self.rollout())
        return False

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    """Look now and then, at no cost to those who are to get on."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"{what}: not in {PATIENCE_S:g} s"
        time.sleep(0.3)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    one = Fleet(tmp_path)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(one.stop)
        one.start(
            "router", "router", "--listen", one.router, "--http-listen", "",
            "--no-local-prefill", "--node-timeout-s", "20", "--pair-timeout-s", "30",
        )  # fmt: skip
        until(one.answers, "the router")
        yield one


class Load:
    """Clients that never stop asking; what each answer says of where it was computed."""

    def __init__(self, router: str) -> None:
        self._router = router
        self.pairs: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self.texts: dict[str, set[str]] = {}
        self._stopping = asyncio.Event()

    async def run(self, num_clients: int = 4) -> None:
        async with AsyncClient(self._router) as client:
            await asyncio.gather(*(self._ask(client, i) for i in range(num_clients)))

    async def _ask(self, client: AsyncClient, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        while not self._stopping.is_set():
            try:
                done = await client.generate(prompt, PARAMS, timeout_s=PATIENCE_S)
            except BatonError as error:
                self.failures.append(repr(error))
                continue
            assert done.receipt is not None
            self.pairs.append((done.receipt.prefill_node, done.receipt.decode_node))
            self.texts.setdefault(prompt, set()).add(done.text)

    def stop(self) -> None:
        self._stopping.set()

    async def answers(self, count: int) -> None:
        """Wait for so many more."""
        goal = len(self.pairs) + count
        while len(self.pairs) < goal:  # noqa: ASYNC110  # of several tasks
            await asyncio.sleep(0.1)

    @property
    def revisions(self) -> set[tuple[str, str]]:
        return {tuple(name.partition("-")[2] for name in pair) for pair in self.pairs}  # type: ignore[misc]


class Watch:
    """Looks at the rollout all the time: how many pairs of nodes serve."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.capacities: list[int] = []

    async def run(self) -> None:
        while True:
            self.capacities.append(await asyncio.to_thread(self._fleet.num_pairs))
            await asyncio.sleep(0.2)


async def roll(fleet: Fleet, here: str, there: str, load: Load) -> None:
    """Replace a revision's two pairs by those of another, one by one."""
    shares = []
    for number in range(2):
        for role in ("prefill", "decode"):
            fleet.start_node(role, number, there)
        await asyncio.to_thread(fleet.wait_for, there, number + 1, number + 1)
        await load.answers(8)  # some requests meet this mixture
        shares.append(fleet.rollout()[there].share)
        ends = (
            asyncio.to_thread(fleet.end_node, f"{letter}{number}-{here}") for letter in ("p", "d")
        )
        await asyncio.gather(*ends)
    assert shares[0] < shares[1], "traffic moves as capacity moves"
    await load.answers(4)
    last = load.pairs[-2:]
    assert {name.partition("-")[2] for pair in last for name in pair} == {there}


def test_forward_and_back_under_load(fleet: Fleet) -> None:
    for number in range(2):
        for role in ("prefill", "decode"):
            fleet.start_node(role, number, OLD)
    fleet.wait_for(OLD, 2, 2)
    load, watch = Load(fleet.router), Watch(fleet)

    async def run() -> None:
        working = asyncio.create_task(load.run())
        watching = asyncio.create_task(watch.run())
        await roll(fleet, OLD, NEW, load)
        await roll(fleet, NEW, OLD, load)
        load.stop()
        await working
        watching.cancel()

    asyncio.run(run())
    logger.info(
        "%d requests, %d failed, pairs of %s; pairs of nodes that served: %s, looked %d times",
        len(load.pairs),
        len(load.failures),
        sorted(load.revisions),
        sorted(set(watch.capacities)),
        len(watch.capacities),
    )
    assert load.failures == []
    assert load.revisions == {(OLD, OLD), (NEW, NEW)}
    assert all(len(texts) == 1 for texts in load.texts.values())  # greedy: as ever
    # Both sides have two pairs; one leaves only when one of the other serves.
    assert min(watch.capacities) >= 2


def test_undo_and_pause_from_the_command_line(fleet: Fleet) -> None:
    """The new revision comes, is undone, and nothing goes there; then it may again."""
    for revision in (OLD, NEW):
        for role in ("prefill", "decode"):
            fleet.start_node(role, 0, revision)
        fleet.wait_for(revision, 1, 1)

    async def ask(count: int) -> set[str]:
        async with AsyncClient(fleet.router) as client:
            call = functools.partial(client.generate, PROMPTS[0], PARAMS, timeout_s=PATIENCE_S)
            done = [await call() for _ in range(count)]
        return {one.receipt.decode_node.partition("-")[2] for one in done if one.receipt}

    assert asyncio.run(ask(4)) == {OLD, NEW}
    assert fleet.admin("rollout", "undo")[0]["state"] == "undone"
    assert asyncio.run(ask(4)) == {OLD}
    assert fleet.admin("rollout", "resume")[0]["state"] == "rolling"
    assert asyncio.run(ask(4)) == {OLD, NEW}
    assert fleet.admin("rollout", "pause")[0]["state"] == "paused"
    fleet.end_node(f"d0-{OLD}")  # what has a share is gone: serving comes first
    assert asyncio.run(ask(2)) == {NEW}
