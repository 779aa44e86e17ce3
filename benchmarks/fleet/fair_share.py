"""Let one tenant ask ten times its share, and measure what the others notice of it.

Three parts. On virtual time (`fair_share_virtual.py`), with the router's own gate, dispatcher and
policy over simulated nodes: the others' times to the first token, alone and beside the greedy one,
and, as a control, with all in one queue as without keys. And with a router process, a process of
simulated nodes and clients with keys: how long the greedy one waits for each refusal. And with
real nodes, one of each role: the others' times again.

    python -m benchmarks fair_share --save
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from baton import AsyncClient, SamplingParams
from baton.access.api_keys import draw_key, entry_text
from baton.api.errors import BatonError, OverloadedError
from baton.processes.free_address import free_address
from benchmarks.fleet.fair_share_virtual import Answer, Scene, p99_s, play
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.run import Run

MOST_RATIO = 1.2
MOST_REFUSAL_S = 0.05
LEAST_CONTROL_RATIO = 2.0
OTHERS = ("t1", "t2", "t3", "t4")
NODES_TOKENS, NODES_ROUNDS = 1500, 3


# ---------------------------------------------------------------- on virtual time


def run_virtual(
    fleet: tuple[int, int], seconds: float, seed: int, others_load: float
) -> dict[str, Any]:
    found: dict[str, Any] = {"fleet": fleet, "seconds": seconds, "others_load": others_load}
    p99: dict[str, float] = {}
    for name, fair, greedy in (
        ("alone", True, False),
        ("beside", True, True),
        ("one_queue", False, True),
    ):
        scene = Scene(
            fleet=fleet,
            seconds=seconds,
            fair=fair,
            greedy=greedy,
            seed=seed,
            others_load=others_load,
        )
        answers = play(scene)
        others = [answer for answer in answers if answer.tenant != "greedy"]
        p99[name] = p99_s(others)
        found[name] = describe(others) | {
            "greedy": dict(Counter(a.outcome for a in answers if a.tenant == "greedy"))
        }
        print(f"virtual, {name}: {found[name]}", flush=True)
    found["ratio"] = round(p99["beside"] / p99["alone"], 3)
    found["ratio_of_one_queue"] = round(p99["one_queue"] / p99["alone"], 3)
    return found


def describe(others: Sequence[Answer]) -> dict[str, Any]:
    times = [answer.ttft_s for answer in others if answer.ttft_s]
    return {
        "requests": len(others),
        "ttft_p50_ms": round(1e3 * statistics.median(times), 1),
        "ttft_p99_ms": round(1e3 * p99_s(others), 1),
        "outcomes": dict(Counter(answer.outcome for answer in others)),
    }


# ---------------------------------------------------------------- with processes


@contextmanager
def running(num_simulated: tuple[int, int] | None) -> Iterator[dict[str, AsyncClient]]:
    """Run a router with keys and its nodes; yield a client of each tenant.

    Args:
        num_simulated: numbers of simulated prefill and decode nodes; None: a real one of each.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        address = free_address()
        made = {name: draw_key() for name in (*OTHERS, "greedy")}
        path = Path(folder, "keys.toml")
        path.write_text("\n".join(entry_text(key, name) for name, key in made.items()), "utf-8")
        model = ["--model", str(DEMO_MODEL)]
        listen = ["--listen", address, "--http-listen", "", "--api-keys-file", str(path)]
        commands = [["router", *model, *listen, "--max-queued-requests", "64"]]
        if num_simulated is None:
            own = ["--router", address, "--listen", "127.0.0.1:0", "--num-blocks", "2048"]
            commands += [
                [role, *model, *own, "--num-threads", "1"] for role in ("prefill", "decode")
            ]
        else:
            fleet = [*zip(("--prefill", "--decode"), map(str, num_simulated), strict=True)]
            own = ["--router", address, *itertools.chain(*fleet), "--time-scale", "4"]
            commands.append(["sim-node", *model, *own])
        environment = {**os.environ, "BATON_NODE_TOKEN": secrets.token_urlsafe(32)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "baton", *command],
                env=environment,
                cwd=DEMO_MODEL.parents[1],
                stderr=subprocess.DEVNULL,
            )
            for command in commands
        ]
        try:
            yield {name: AsyncClient(address, api_key=key) for name, key in made.items()}
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(30)


async def ask(client: AsyncClient, tenant: str, num_tokens: int) -> Answer:
    prompt = [random.randrange(900) for _ in range(8)] + [1] * (num_tokens - 8)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    began, ttft_s, outcome = time.perf_counter(), 0.0, "complete"
    try:
        async for _ in client.stream(prompt, params, timeout_s=60):
            ttft_s = ttft_s or time.perf_counter() - began
    except OverloadedError:
        outcome = "refused"
    except BatonError as error:
        outcome = type(error).__name__
    return Answer(tenant, began, outcome, ttft_s, time.perf_counter() - began, num_tokens)


async def wait_ready(client: AsyncClient, num_tokens: int) -> None:
    give_up_at = time.monotonic() + 60
    while (await ask(client, "", num_tokens)).outcome != "complete":
        if time.monotonic() > give_up_at:
            raise TimeoutError("the nodes do not come up")
        await asyncio.sleep(0.5)


async def arrive(
    client: AsyncClient, tenant: str, rate: float, seconds: float, num_tokens: int = 1500
) -> list[Answer]:
    """Send requests in Poisson arrivals; return all answers, without a greedy tenant's queue."""
    tasks, ends_at = [], time.monotonic() + seconds
    while time.monotonic() < ends_at:
        tasks.append(asyncio.create_task(ask(client, tenant, num_tokens)))
        await asyncio.sleep(random.expovariate(rate))
    if tenant == "greedy":
        for task in tasks:
            task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [answer for answer in found if isinstance(answer, Answer)]


async def drill(clients: dict[str, AsyncClient], seconds: float) -> dict[str, Any]:
    await wait_ready(clients["t1"], 1500)
    rates = dict.fromkeys(OTHERS, 2.0)  # 16 nodes do 56 prompts of 1,500 tokens a second
    found: dict[str, Any] = {}
    for name, more in (("alone", {}), ("beside", {"greedy": 112.0})):
        loads = [arrive(clients[t], t, rate, seconds) for t, rate in (rates | more).items()]
        answers = [answer for part in await asyncio.gather(*loads) for answer in part]
        others = [answer for answer in answers if answer.tenant != "greedy"]
        refused = sorted(a.total_s for a in answers if a.outcome == "refused")
        found[name] = describe(others)
        if more:
            found["greedy"] = dict(Counter(a.outcome for a in answers if a.tenant == "greedy"))
            if refused:
                found["refused_p50_ms"] = round(1e3 * statistics.median(refused), 1)
                found["refused_p99_ms"] = round(1e3 * refused[int(0.99 * len(refused))], 1)
        print(f"processes, {name}: {found}", flush=True)
    for client in clients.values():
        await client.close()
    return found


def run_processes(seconds: float) -> dict[str, Any]:
    async def scene() -> dict[str, Any]:
        with running((16, 4)) as clients:
            return await drill(clients, seconds)

    return asyncio.run(scene())


# ---------------------------------------------------------------- with real nodes


def run_nodes(seconds: float) -> dict[str, Any]:
    """Run rounds alone and beside a greedy tenant in turns; return the times of all rounds."""

    async def scene() -> dict[str, Any]:
        with running(None) as clients:
            await wait_ready(clients["t1"], NODES_TOKENS)
            began = time.perf_counter()
            await asyncio.gather(*(ask(clients["t1"], "t1", NODES_TOKENS) for _ in range(40)))
            share = 40 / (time.perf_counter() - began) / (len(OTHERS) + 1)
            rates = dict.fromkeys(OTHERS, 0.3 * share)
            answers: dict[str, list[Answer]] = {"alone": [], "beside": []}
            for _ in range(NODES_ROUNDS):
                for name, more in (("alone", {}), ("beside", {"greedy": 10 * share})):
                    loads = [
                        arrive(clients[t], t, rate, seconds, NODES_TOKENS)
                        for t, rate in (rates | more).items()
                    ]
                    answers[name] += itertools.chain(*await asyncio.gather(*loads))
            for client in clients.values():
                await client.close()
        others = {n: [a for a in all_ if a.tenant != "greedy"] for n, all_ in answers.items()}
        found: dict[str, Any] = {name: describe(part) for name, part in others.items()}
        found["share_per_s"] = round(share, 2)
        found["greedy"] = dict(
            Counter(a.outcome for a in answers["beside"] if a.tenant == "greedy")
        )
        found["ratio"] = round(p99_s(others["beside"]) / p99_s(others["alone"]), 3)
        print(f"nodes: {found}", flush=True)
        return found

    return asyncio.run(scene())


def run(
    run: Run,
    prefill: int = 64,
    decode: int = 8,
    seconds: float = 6.0,
    others_load: float = 0.6,
    seed: int = 1,
    process_seconds: float = 30.0,
    parts: Sequence[Literal["virtual", "processes", "nodes"]] = ("virtual", "processes", "nodes"),
) -> None:
    """Measure parts one after the other; each has a file of results.

    Args:
        seconds: virtual time.
        others_load: the other tenants' load, as a part of their shares.
    """
    for part in parts:
        if part == "virtual":
            found = run_virtual((prefill, decode), seconds, seed, others_load)
            problems = problems_of_virtual(found)
        elif part == "processes":
            found = run_processes(process_seconds)
            problems = problems_of_processes(found)
        else:
            found = run_nodes(process_seconds)
            problems = problems_of_nodes(found)
        run.show(part, found)
        run.save({**found, "problems": problems}, f"fair_share_{part}")
        run.problems += problems


def problems_of_virtual(found: dict[str, Any]) -> list[str]:
    problems = []
    if found["ratio"] > MOST_RATIO:
        problems.append(f"others' p99 is {found['ratio']} of alone, at most {MOST_RATIO}")
    if found["ratio_of_one_queue"] < LEAST_CONTROL_RATIO:
        problems.append("with all in one queue nobody notices the greedy one: it is no test")
    return problems


def problems_of_nodes(found: dict[str, Any]) -> list[str]:
    if "greedy" not in found or found["greedy"].get("complete", 0) < 1:
        return ["the greedy one got nothing: it is no test"]
    if found["ratio"] > MOST_RATIO:
        return [f"others' p99 with real nodes is {found['ratio']} of alone, at most {MOST_RATIO}"]
    return []


def problems_of_processes(found: dict[str, Any]) -> list[str]:
    if "refused_p99_ms" not in found:
        return ["nothing was refused: it is no test"]
    if found["refused_p99_ms"] > 1e3 * MOST_REFUSAL_S:
        return [f"refusals take {found['refused_p99_ms']} ms, at most {1e3 * MOST_REFUSAL_S:g}"]
    return []
