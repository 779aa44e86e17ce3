"""Send more than 300 kinds of hostile requests (shapes) to a real split system, one by one.

While each request is served or refused, a probe asks for /health, and another client streams
outputs.

    python -m benchmarks hostile_shapes [--only TEXT] [--timeout 20]

The results are the longest answer time of /health, the longest gap in the other client's stream,
and the growth of the memory of router, nodes and workers. `GOALS` has their limits; each shape that
misses a goal is printed, and makes the exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil

from baton.api.errors import BatonError
from baton.api.sampling_params import SamplingParams
from baton.client.client import AsyncClient
from baton.deployment.local_deployment import LocalDeployment
from benchmarks.runner.deployments import deployed
from benchmarks.runner.run import Document, Run
from benchmarks.security.hostile_table import Shape, all_shapes

GOALS = {"health_ms": 250.0, "gap_ms": 1000.0, "growth_mib": 256.0, "ended": 0}
PROBE_S = 0.02
SETTLE_S = 0.05
MEMORY_S = 0.1


@dataclass
class Held:
    """The worst figures of a `Watch` since this object was made."""

    health_ms: float = 0.0
    gap_ms: float = 0.0
    growth_mib: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """The outcome of one shape."""

    name: str
    answer: str
    took_s: float
    health_ms: float
    gap_ms: float
    growth_mib: float
    grown: str
    ended: list[str]

    def misses(self) -> list[str]:
        return [goal for goal, limit in GOALS.items() if goal != "ended"
                and getattr(self, goal) > limit] + (["ended"] if self.ended else [])  # fmt: skip


class Watch:
    """A probe, another client's stream, and a measurement of memory, while requests are sent."""

    def __init__(self, deployment: LocalDeployment, url: str) -> None:
        self.held = Held()
        self.deployment = deployment
        self._url = url
        self._base: dict[str, float] = {}

    async def probe(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                began_at = time.perf_counter()
                try:
                    async with session.get(f"{self._url}/health") as response:
                        await response.read()
                except aiohttp.ClientError as error:
                    self.held.failed.append(f"/health: {error}")
                took_ms = 1000 * (time.perf_counter() - began_at)
                self.held.health_ms = max(self.held.health_ms, took_ms)
                await asyncio.sleep(PROBE_S)

    async def stream(self) -> None:
        """Stream long outputs, one after another; a gap is the time between two messages."""
        params = SamplingParams(max_tokens=1500, temperature=0.7, ignore_eos=True)
        async with AsyncClient(self.deployment.config.listen) as client:
            while True:
                last_at = None
                try:
                    async for _ in client.stream("def main(", params):
                        now = time.perf_counter()
                        if last_at is not None:
                            self.held.gap_ms = max(self.held.gap_ms, 1000 * (now - last_at))
                        last_at = now
                except BatonError as error:
                    self.held.failed.append(f"another client's stream: {error}")
                    await asyncio.sleep(0.1)

    async def memory(self) -> None:
        while True:
            for name, mib in self.sizes().items():
                grown = mib - self._base.get(name, mib)
                self.held.growth_mib[name] = max(self.held.growth_mib.get(name, 0.0), grown)
            await asyncio.sleep(MEMORY_S)

    def sizes(self) -> dict[str, float]:
        """Return the memory (MiB) of each program, and of each program's largest worker process."""
        sizes: dict[str, float] = {}
        for child in self.deployment.children:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(child.process.pid)
                sizes[child.name] = process.memory_info().rss / 2**20
                for worker in process.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        name, mib = f"{child.name} worker", worker.memory_info().rss / 2**20
                        sizes[name] = max(sizes.get(name, 0.0), mib)
        return sizes

    def begin(self) -> None:
        self._base = self.sizes()
        # Assumed size, in MiB, of workers that start later; growth is counted from this size
        for child in self.deployment.children:
            self._base.setdefault(f"{child.name} worker", 60.0)
        self.held = Held()


async def send(shape: Shape, url: str, address: str, timeout_s: float) -> str:
    """Send a hostile request; return in a few words how it was answered."""
    try:
        async with asyncio.timeout(timeout_s):
            if shape.method:
                async with grpc.aio.insecure_channel(
                    address, options=[("grpc.max_send_message_length", 2**26)]
                ) as channel:
                    call = channel.unary_stream(f"/baton.v1.Inference/{shape.method}", bytes, bytes)
                    num = 0
                    async for _ in call(shape.body, metadata=tuple(shape.headers.items())):
                        num += 1
                    return f"OK, {num} messages"
            headers = {"Content-Type": "application/json", **shape.headers}
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + shape.path, data=shape.body, headers=headers) as response,
            ):
                text = (await response.read())[:300].decode(errors="replace")
                if response.status >= 500:
                    return f"{response.status} {text}"
                return str(response.status) + ("" if response.status < 300 else f" {text[:160]}")
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {(error.details() or '')[:160]}"
    except TimeoutError:
        return "still served when its client left"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{type(error).__name__} {str(error)[:100]}"


@contextlib.asynccontextmanager
async def watching(deployment: LocalDeployment, url: str) -> AsyncIterator[Watch]:
    watch = Watch(deployment, url)
    tasks = [asyncio.create_task(part()) for part in (watch.probe, watch.stream, watch.memory)]
    try:
        yield watch
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_all(
    deployment: LocalDeployment, url: str, shapes: list[Shape], timeout_s: float
) -> tuple[list[Outcome], Held]:
    outcomes = []
    async with watching(deployment, url) as watch:
        await asyncio.sleep(3)  # wait for the other client's first output
        watch.begin()
        await asyncio.sleep(5)
        quiet = watch.held  # the figures without an attack
        for shape in shapes:
            watch.begin()
            began_at = time.perf_counter()
            answer = await send(shape, url, deployment.config.listen, timeout_s)
            took_s = time.perf_counter() - began_at
            await asyncio.sleep(SETTLE_S)
            held = watch.held
            grown = max(held.growth_mib, key=lambda name: held.growth_mib[name], default="")
            ended = [one.name for one in deployment.children if one.process.poll() is not None]
            outcome = Outcome(
                shape.name, answer, round(took_s, 3), round(held.health_ms, 1),
                round(held.gap_ms, 1), round(held.growth_mib.get(grown, 0.0), 1), grown, ended,
            )  # fmt: skip
            outcomes.append(outcome)
            if missed := outcome.misses():
                print(f"{shape.name}: misses {', '.join(missed)}: {outcome}", flush=True)
            elif answer.startswith("5") or answer.split(" ")[0] in ("UNKNOWN", "INTERNAL"):
                print(f"{shape.name}: answered {answer[:200]}", flush=True)
            if ended:
                break
    return outcomes, quiet


def run(run: Run, only: str = "", timeout: float = 20.0) -> Document:
    """Send every shape, and print those that miss a goal.

    Args:
        only: part of the names of the shapes to send.
        timeout: seconds after which the hostile client disconnects.
    """
    shapes = [shape for shape in all_shapes() if only in shape.name]
    with deployed(with_http=True, router_args=["--served-model-name", "demo"]) as deployment:
        url = f"http://{deployment.config.http_listen}"
        outcomes, quiet = asyncio.run(run_all(deployment, url, shapes, timeout))
    failed = [outcome.name for outcome in outcomes if outcome.misses()]
    worst = worst_of(outcomes)
    print(f"{len(outcomes)} shapes, {len(failed)} miss a goal; worst {worst}")
    run.problems += [f"{name} misses a goal" for name in failed]
    if len(outcomes) < len(shapes):
        run.problems.append(f"{len(outcomes)} of {len(shapes)} shapes were sent")
    without = {"health_ms": round(quiet.health_ms, 1), "gap_ms": round(quiet.gap_ms, 1)}
    results = {
        "goals": GOALS, "num_shapes": len(outcomes), "failed": failed, "worst": worst,
        "without_them": without, "shapes": [asdict(outcome) for outcome in outcomes],
    }  # fmt: skip
    found: Document = json.loads(json.dumps(results))
    return found


def worst_of(outcomes: Sequence[Any]) -> dict[str, float]:
    """Return the largest figure over all outcomes, for each goal."""
    return {
        goal: max(getattr(outcome, goal) for outcome in outcomes)
        for goal in ("health_ms", "gap_ms", "growth_mib")
    }
