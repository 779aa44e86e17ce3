"""Kill nodes, cut links and stop processes under load: all harmless requests must succeed.

A router, two prefill and two decode nodes with NIXL run on this machine. The nodes serve the demo
model to requests with known answers; every request must complete with the right tokens. A killer
request (`--inject-faults poison=`) kills each node that computes it; the router must refuse this
request after it has killed at most two nodes. `innocents_virtual.py` runs these drills on simulated
nodes, with many seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.access.exposure import split_address
from baton.api.errors import PoisonRequestError
from baton.deployment.local_deployment import LocalDeployment, LocalDeploymentConfig
from baton.processes.free_address import free_address
from benchmarks.faults.chaos import NODE_ARGS
from benchmarks.faults.chaos_load import Load, make_cases, under_load
from benchmarks.faults.chaos_site import Site
from benchmarks.runner.answers import Case, follow
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Document, Run

KILLER = "poison"
KILLER_PROMPT = [11 + (i * 37) % 4000 for i in range(400)]
MOST_KILLED = 2
POLL_S = 0.05

Row = dict[str, Any]


class Proxy:
    """A TCP proxy in front of the router, which can cut and refuse connections."""

    def __init__(self, target: str) -> None:
        self.address = free_address()
        self._target = split_address("router", target)
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self) -> None:
        """Forward bytes between nodes and router until cancelled."""
        host, port = split_address("proxy", self.address)
        async with await asyncio.start_server(self._carry, host, port) as server:
            await server.serve_forever()

    async def cut(self, seconds: float) -> None:
        """Cut all connections, and refuse new ones for some seconds."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(seconds)
        self._is_cut = False

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._target)
        both = {writer, back}
        self._writers |= both
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@dataclass(slots=True)
class Scene:
    """A deployment under load.

    Attributes:
        proxies: by node name, the proxy through which the node dials the router.
        num_kills: number of kills in the drill that kills nodes in turns.
        num_deaths: how many nodes have ended so far; each is restarted at once.
    """

    site: Site
    proxies: dict[str, Proxy]
    num_kills: int
    num_deaths: int = 0
    doings: list[str] = field(default_factory=list)

    async def supervise(self) -> None:
        """Restart ended nodes, as a service manager does."""
        while True:
            await asyncio.sleep(POLL_S)
            for child in list(self.site.deployment.children):
                if child.process.poll() is not None:
                    await asyncio.to_thread(self.site.deployment.restart, child.name)
                    self.num_deaths += 1

    async def kill(self, name: str) -> None:
        """Kill a node, and wait until the restarted node has joined under its name."""
        self.site.deployment.child(name).process.kill()
        num_deaths = self.num_deaths
        while self.num_deaths == num_deaths:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Drill:
    """Faults of a deployment under load.

    Attributes:
        through_proxies: whether the first node of each role dials the router through a proxy.
        poisoned: role whose nodes the killer request kills ("p" or "d"); empty: there is no killer.
    """

    name: str
    act: Callable[[Scene], Awaitable[None]]
    num_decode: int = 2
    through_proxies: bool = False
    poisoned: str = ""


async def kill_in_turns(scene: Scene) -> None:
    """Kill a prefill node and a decode node in turns, each soon after all nodes have joined."""
    draw = scene.site.draw
    for number in range(scene.num_kills):
        await scene.site.wait_ready()
        await asyncio.sleep(draw.uniform(0.0, 2.0))
        name = draw.choice(("p0", "p1") if number % 2 == 0 else ("d0", "d1"))
        scene.doings.append(name)
        await scene.kill(name)


async def break_links_twice(scene: Scene) -> None:
    """Cut the links of a prefill node and of a decode node in turns, each for 0.3 s, ten times."""
    for number in range(10):
        await scene.proxies["pd"[number % 2] + "0"].cut(0.3)
        await asyncio.sleep(scene.site.draw.uniform(0.3, 2.5))


async def stand_still(scene: Scene) -> None:
    """Stop a prefill node and then a decode node for 3 s, three times."""
    draw = scene.site.draw
    for _ in range(3):
        for role in "pd":
            await scene.site.stand_still(f"{role}{draw.randrange(2)}", 3.0)
            await asyncio.sleep(draw.uniform(0.0, 1.5))


async def cut_the_only_decode_node(scene: Scene) -> None:
    """Cut the link of the only decode node for 10 s."""
    await asyncio.sleep(2.0)
    await scene.proxies["d0"].cut(10.0)


async def send_killer(scene: Scene) -> None:
    """Send a request that kills nodes, and send it again after its refusal."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    async with AsyncClient(scene.site.address) as client:
        for number in range(2):
            await asyncio.sleep(2.0)
            request_id = f"{KILLER}-{number}"
            stream = client.stream(KILLER_PROMPT, params, request_id=request_id, timeout_s=60)
            answer = await follow(stream)
            scene.doings.append(f"{answer.outcome}: {answer.detail}")


def drills() -> list[Drill]:
    """Return all drills."""
    return [
        Drill("kills of P and D in turns", kill_in_turns),
        Drill("links broken for 0.3 s, ten times", break_links_twice, through_proxies=True),
        Drill("standstills of 3 s, six", stand_still),
        Drill("the only decode node cut for 10 s", cut_the_only_decode_node, 1, True),
        Drill("a request that kills prefill nodes", send_killer, poisoned="p"),
        Drill("a request that kills decode nodes", send_killer, poisoned="d"),
    ]


async def run_drill(drill: Drill, cases: list[Case], options: Options, seed: int) -> Row:
    """Run a drill under load; return the outcomes of all requests."""
    poison = ["--inject-faults", f"poison={KILLER}"]
    config = LocalDeploymentConfig(
        model=str(DEMO_MODEL),
        listen=free_address(),
        num_prefill=2,
        num_decode=drill.num_decode,
        router_args=["--no-local-prefill"],
        node_args=NODE_ARGS,
        prefill_args=poison if drill.poisoned == "p" else [],
        decode_args=poison if drill.poisoned == "d" else [],
    )
    with LocalDeployment(config) as deployment:
        site = Site(deployment, cases, seed)
        await site.wait_ready()
        proxies = {name: Proxy(config.router_address) for name in ("p0", "d0")}
        scene = Scene(site, proxies, options.kills)
        with _jobs([proxy.serve() for proxy in proxies.values()]):
            for name, proxy in proxies.items() if drill.through_proxies else ():
                arguments = deployment.child(name).arguments
                arguments[arguments.index("--router") + 1] = proxy.address
                await asyncio.to_thread(deployment.restart, name)
            await asyncio.sleep(1.0)
            await site.wait_ready()
            load = Load(site.address, cases, options.concurrency, seed, leaving=0.0)
            async with under_load(load):
                with _jobs([scene.supervise()]):
                    began = time.monotonic()
                    await drill.act(scene)
                    while len(load.answers) < options.requests or time.monotonic() < began + 5.0:  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
    complete = [answer for answer in load.answers if answer.outcome == "complete"]
    others = {f"{a.outcome}: {a.detail}" for a in load.answers if a.outcome != "complete"}
    return {
        "seed": seed,
        "requests": len(load.answers),
        "complete": len(complete),
        "attempts": dict(sorted(Counter(answer.attempts for answer in complete).items())),
        "longest_gap_s": round(max(answer.longest_gap_s for answer in complete), 2),
        "others": sorted(others),
        "deaths": scene.num_deaths,
        "doings": scene.doings,
    }


@contextlib.contextmanager
def _jobs(coroutines: list[Any]) -> Iterator[None]:
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def problems_of(drill: Drill, row: Row) -> list[str]:
    """Return a line for each broken promise of a drill."""
    problems = list(row["others"])
    if drill.poisoned:
        names = [doing.partition(":")[0] for doing in row["doings"]]
        if names != [PoisonRequestError.__name__] * 2:
            problems.append(f"the killer: {row['doings']}")
        if row["deaths"] > MOST_KILLED:
            problems.append(f"the killer ended {row['deaths']} nodes")
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which drills to run, and under which load.

    Attributes:
        only: part of the names of the drills to run.
        seeds: seeds of the drills; empty: one random seed.
        kills: number of kills in the drill that kills nodes in turns.
        requests: smallest number of requests of a drill.
    """

    only: str = ""
    seeds: Sequence[int] = ()
    kills: int = 20
    requests: int = 200
    concurrency: int = 8


def run(run: Run, options: Options) -> Document:
    """Run every drill with every seed."""
    seeds = options.seeds or [random.randrange(2**16)]
    cases = make_cases(str(DEMO_MODEL), 16, seeds[0])
    results: dict[str, list[Row]] = {}
    for drill in drills():
        for seed in seeds if options.only in drill.name else ():
            row = asyncio.run(run_drill(drill, cases, options, seed))
            row["problems"] = problems_of(drill, row)
            run.problems += [f"{drill.name}, seed {seed}: {text}" for text in row["problems"]]
            results.setdefault(drill.name, []).append(row)
            run.console.print(f"{drill.name}: {row}")
    return {"drills": results}
