"""Let one tenant send ten times its share; measure how much slower the others' answers get.

There are three parts. In virtual time, the router's gate, dispatcher and policy run over simulated
nodes. The other tenants' times to the first token are measured without and with the greedy tenant
and, as a control, with all tenants in one queue, as if they had no keys. With processes (a router,
simulated nodes, clients with keys), the time of a refusal of the greedy tenant is measured. With
two real nodes, the other tenants' times to the first token are measured again.

    python -m benchmarks fair_share --save
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from baton import AsyncClient, SamplingParams
from baton.access.api_keys import draw_key, entry_text
from baton.access.identity import ANYBODY, Principal
from baton.processes.free_address import free_address
from benchmarks.fleet.virtual_fleet import MODEL, VirtualRouter, joined_fleet, on_virtual_time
from benchmarks.runner.answers import Answer, OpenLoad, follow
from benchmarks.runner.environment import DEMO_MODEL
from benchmarks.runner.programs import Programs
from benchmarks.runner.run import Run
from router.gate.admission import Admission
from router.gate.admission_options import AdmissionOptions
from router.gate.capacity import Capacity
from sim_node.options import SimOptions

MOST_RATIO = 1.2
MOST_REFUSAL_S = 0.05
LEAST_CONTROL_RATIO = 2.0
OTHERS = ("t1", "t2", "t3", "t4")
PROMPT_TOKENS, NODES_ROUNDS = 1500, 3


NUM_TENANTS = 5
GREEDY_LOAD = 10.0  # load of the greedy tenant, as a multiple of its share
WARM_UP_S = 5.0
TIMEOUT_S = 60.0
MAX_QUEUED = 256
VIRTUAL_PROMPT_TOKENS = (2000, 6000)
OUTPUT_TOKENS = (16, 64)


# ---------------------------------------------------------------- on virtual time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The fleet, the load and the length of a run in virtual time.

    Attributes:
        fleet: number of prefill nodes, and number of decode nodes.
        seconds: duration of the measured load, in virtual seconds.
        fair: whether tenants have keys; without keys all requests count as one tenant's.
        others_load: load of each other tenant, as a fraction of its share.
    """

    fleet: tuple[int, int]
    seconds: float
    fair: bool = True
    greedy: bool = True
    seed: int = 1
    others_load: float = 0.3


async def send_all(
    loads: Mapping[str, OpenLoad], rates: Mapping[str, float], seconds: float
) -> None:
    """Send all tenants' requests for some seconds; then cancel the greedy tenant's requests."""
    await asyncio.gather(*(loads[name].arrive(rate, seconds) for name, rate in rates.items()))
    await asyncio.gather(*(loads[name].finish() for name in rates if name != "greedy"))
    await loads["greedy"].cancel()


def make_load(router: VirtualRouter, scene: Scene, tenant: str) -> OpenLoad:
    """Make a load of a tenant's requests, whose prompts are in no prefix cache."""
    draw = random.Random(f"{scene.seed} {tenant}")
    principal = Principal(name=tenant, tenant=tenant) if scene.fair else ANYBODY

    async def ask() -> Answer:
        own = [draw.randrange(MODEL["vocab_size"]) for _ in range(8)]
        prompt = own + [0] * (draw.randint(*VIRTUAL_PROMPT_TOKENS) - len(own))
        max_tokens = draw.randint(*OUTPUT_TOKENS)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        call = router.call(prompt, params, timeout_s=TIMEOUT_S, principal=principal)
        return await follow(router.dispatcher.run(call))

    return OpenLoad(ask, draw)


async def play(scene: Scene) -> dict[str, list[Answer]]:
    """Play a scene; return the answers to each tenant's requests after the warm-up."""
    options = SimOptions(block_size=64, num_blocks=6_500)
    async with joined_fleet(*scene.fleet, options, local_prefill=False) as pool:
        capacity = Capacity(lambda: pool.fleet, clock=pool.clock)
        gate = Admission(capacity, AdmissionOptions(max_queued_requests=MAX_QUEUED))
        router = VirtualRouter(pool, admission=gate)
        began_at = asyncio.get_running_loop().time()
        share = capacity_per_s(scene.fleet[0], options) / NUM_TENANTS
        rates = {f"t{i}": scene.others_load * share for i in range(1, NUM_TENANTS)}
        loads = {name: make_load(router, scene, name) for name in (*rates, "greedy")}
        if scene.greedy:
            rates["greedy"] = GREEDY_LOAD * share
        await send_all(loads, rates, WARM_UP_S + scene.seconds)
        return {
            name: [one for one in load.answers if one.sent_at >= began_at + WARM_UP_S]
            for name, load in loads.items()
        }


def capacity_per_s(num_prefill: int, options: SimOptions) -> float:
    """Return how many requests' prompts the prefill nodes can compute per second."""
    num_tokens = sum(VIRTUAL_PROMPT_TOKENS) // 2
    seconds = options.timing.prefill_s(num_tokens, num_tokens * (num_tokens + 1) // 2)
    return num_prefill / seconds


def p99_s(answers: Sequence[Answer]) -> float:
    """Return the 99th percentile of the times to the first token, in seconds."""
    times = sorted(answer.ttft_s for answer in answers if answer.ttft_s)
    return statistics.quantiles(times, n=100, method="inclusive")[98]


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
            fleet=fleet, seconds=seconds, fair=fair, greedy=greedy, seed=seed,
            others_load=others_load,
        )  # fmt: skip
        answers = on_virtual_time(play(scene))
        p99[name] = p99_s(others_of(answers))
        found[name] = describe(answers) | {"greedy": outcomes_of(answers["greedy"])}
        print(f"virtual, {name}: {found[name]}", flush=True)
    found["ratio"] = round(p99["beside"] / p99["alone"], 3)
    found["ratio_of_one_queue"] = round(p99["one_queue"] / p99["alone"], 3)
    return found


def others_of(answers: Mapping[str, Sequence[Answer]]) -> list[Answer]:
    """Return the answers of all tenants except the greedy tenant."""
    return [one for name, some in answers.items() if name != "greedy" for one in some]


def outcomes_of(answers: Sequence[Answer]) -> dict[str, int]:
    return dict(Counter(answer.outcome for answer in answers))


def describe(answers: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Summarize the other tenants' answers."""
    others = others_of(answers)
    times = [answer.ttft_s for answer in others if answer.ttft_s]
    return {
        "requests": len(others),
        "ttft_p50_ms": round(1e3 * statistics.median(times), 1),
        "ttft_p99_ms": round(1e3 * p99_s(others), 1),
        "outcomes": outcomes_of(others),
    }


# ---------------------------------------------------------------- with processes


@contextmanager
def running(num_simulated: tuple[int, int] | None) -> Iterator[dict[str, AsyncClient]]:
    """Run a router with keys, and its nodes; yield each tenant's client by name.

    Args:
        num_simulated: numbers of simulated prefill and decode nodes; None: two real nodes.
    """
    address, token = free_address(), secrets.token_urlsafe(32)
    made = {name: draw_key() for name in (*OTHERS, "greedy")}
    with (
        tempfile.TemporaryDirectory(prefix="baton-") as folder,
        Programs(BATON_NODE_TOKEN=token) as programs,
    ):
        path = Path(folder, "keys.toml")
        path.write_text("\n".join(entry_text(key, name) for name, key in made.items()), "utf-8")
        model = ("--model", DEMO_MODEL)
        listen = ("--listen", address, "--http-listen", "", "--api-keys-file", path)
        programs.start("router", "router", *model, *listen, "--max-queued-requests", 64)
        if num_simulated is None:
            own = ("--router", address, "--listen", "127.0.0.1:0", "--num-blocks", 2048)
            for role in ("prefill", "decode"):
                programs.start(role, role, *model, *own, "--num-threads", 1)
        else:
            counts = itertools.chain(*zip(("--prefill", "--decode"), num_simulated, strict=True))
            programs.start(
                "nodes", "sim-node", *model, "--router", address, *counts, "--time-scale", 4
            )
        yield {name: AsyncClient(address, api_key=key) for name, key in made.items()}


async def ask(client: AsyncClient) -> Answer:
    """Send a prompt that is in no node's prefix cache; return the answer."""
    prompt = [random.randrange(900) for _ in range(8)] + [1] * (PROMPT_TOKENS - 8)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    return await follow(client.stream(prompt, params, timeout_s=60))


async def wait_ready(client: AsyncClient) -> None:
    give_up_at = time.monotonic() + 60
    while (await ask(client)).outcome != "complete":
        if time.monotonic() > give_up_at:
            raise TimeoutError("the nodes do not come up")
        await asyncio.sleep(0.5)


async def send(
    clients: Mapping[str, AsyncClient], rates: Mapping[str, float], seconds: float
) -> dict[str, list[Answer]]:
    """Send each tenant's requests at its rate; return the answers by tenant."""
    loads = {
        name: OpenLoad(partial(ask, client), random.Random()) for name, client in clients.items()
    }
    await send_all(loads, rates, seconds)
    return {name: load.answers for name, load in loads.items()}


async def run_processes(seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with running((16, 4)) as clients:
        await wait_ready(clients["t1"])
        # requests per second; 16 nodes compute 56 prompts of 1,500 tokens per second
        rates = dict.fromkeys(OTHERS, 2.0)
        for name, more in (("alone", {}), ("beside", {"greedy": 112.0})):
            answers = await send(clients, rates | more, seconds)
            found[name] = describe(answers)
            print(f"processes, {name}: {found}", flush=True)
        for client in clients.values():
            await client.close()
    found["greedy"] = outcomes_of(answers["greedy"])
    every = [answer for some in answers.values() for answer in some]
    refused = sorted(answer.total_s for answer in every if answer.outcome == "refused")
    if refused:
        found["refused_p50_ms"] = round(1e3 * statistics.median(refused), 1)
        found["refused_p99_ms"] = round(1e3 * refused[int(0.99 * len(refused))], 1)
    return found


# ---------------------------------------------------------------- with real nodes


async def run_nodes(seconds: float) -> dict[str, Any]:
    """Measure rounds without and with the greedy tenant in turns; return their figures."""
    answers: dict[str, dict[str, list[Answer]]] = {"alone": {}, "beside": {}}
    with running(None) as clients:
        await wait_ready(clients["t1"])
        began = time.perf_counter()
        await asyncio.gather(*(ask(clients["t1"]) for _ in range(40)))
        share = 40 / (time.perf_counter() - began) / (len(OTHERS) + 1)
        rates = dict.fromkeys(OTHERS, 0.3 * share)
        for _ in range(NODES_ROUNDS):
            for name, more in (("alone", {}), ("beside", {"greedy": 10 * share})):
                for tenant, some in (await send(clients, rates | more, seconds)).items():
                    answers[name].setdefault(tenant, []).extend(some)
        for client in clients.values():
            await client.close()
    found: dict[str, Any] = {name: describe(part) for name, part in answers.items()}
    found["share_per_s"] = round(share, 2)
    found["greedy"] = outcomes_of(answers["beside"]["greedy"])
    p99 = {name: p99_s(others_of(part)) for name, part in answers.items()}
    found["ratio"] = round(p99["beside"] / p99["alone"], 3)
    return found


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
    """Measure the chosen parts one after another; each part has its own file of results.

    Args:
        seconds: length of each run in virtual time, in virtual seconds.
        others_load: load of each other tenant, as a fraction of its share.
    """
    for part in parts:
        if part == "virtual":
            found = run_virtual((prefill, decode), seconds, seed, others_load)
            problems = problems_of_virtual(found)
        elif part == "processes":
            found = asyncio.run(run_processes(process_seconds))
            problems = problems_of_processes(found)
        else:
            found = asyncio.run(run_nodes(process_seconds))
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
