"""One tenant at ten times its share beside others, on virtual time: what the others notice of it.

The router's gate, dispatcher and policy and the simulator's nodes are as they are; messages and
clocks are virtual, so that nothing but the order of requests counts. Part of `fair_share.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baton.access.identity import ANYBODY, Principal
from baton.api.errors import BatonError, OverloadedError
from baton.api.sampling_params import SamplingParams
from benchmarks.fleet.virtual_fleet import MODEL, joined_fleet
from router.calls.call import Call, Terms
from router.calls.dispatcher import Dispatcher
from router.calls.wake_ups import WakeUps
from router.fleet.node_pool import NodePool
from router.gate.admission import Admission
from router.gate.admission_options import AdmissionOptions
from router.gate.capacity import Capacity
from router.policies import POLICIES
from sim_node.options import SimOptions
from sim_node.virtual_time import VirtualTimeLoop

NUM_TENANTS = 5
GREEDY_LOAD = 10.0  # of its share
WARM_UP_S = 5.0
TIMEOUT_S = 60.0
MAX_QUEUED = 256
PROMPT_TOKENS = (2000, 6000)
OUTPUT_TOKENS = (16, 64)


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request; times are seconds."""

    tenant: str
    sent_at: float
    outcome: str
    ttft_s: float
    total_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Fleet, load and length of a scene.

    Attributes:
        fleet: numbers of prefill and decode nodes.
        seconds: duration of the load that is measured.
        fair: whether tenants have keys; without keys all count as one tenant.
        others_load: the other tenants' load, as a part of their shares.
    """

    fleet: tuple[int, int]
    seconds: float
    fair: bool = True
    greedy: bool = True
    seed: int = 1
    others_load: float = 0.3


class Load:
    """Requests of tenants to one router, answered on virtual time."""

    def __init__(self, pool: NodePool, scene: Scene) -> None:
        self._scene = scene
        self._loop = asyncio.get_running_loop()
        capacity = Capacity(lambda: pool.fleet, clock=pool.clock)
        gate = Admission(capacity, AdmissionOptions(max_queued_requests=MAX_QUEUED))
        self._dispatcher = Dispatcher(pool, POLICIES.load("cost")(), admission=gate)
        self._dispatcher.wake_ups = WakeUps(clock=self._loop.time, cpu_clock=self._loop.time)
        self._numbers = itertools.count()

    async def arrive(self, tenant: str, rate: float, seconds: float) -> list[asyncio.Task[Answer]]:
        """Begin so many requests per second, by chance (Poisson), for so long."""
        draw = random.Random(f"{self._scene.seed} {tenant}")
        tasks, due = [], self._loop.time()
        ends_at = due + seconds
        while (due := due + draw.expovariate(rate)) < ends_at:
            await asyncio.sleep(due - self._loop.time())
            own = [draw.randrange(MODEL["vocab_size"]) for _ in range(8)]  # nobody has it cached
            prompt = own + [0] * (draw.randint(*PROMPT_TOKENS) - len(own))
            call = self.call(tenant, prompt, draw.randint(*OUTPUT_TOKENS))
            tasks.append(asyncio.create_task(self.ask(tenant, call), name=tenant))
        return tasks

    def call(self, tenant: str, prompt: list[int], max_tokens: int) -> Call:
        who = Principal(name=tenant, tenant=tenant)
        return Call(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
            terms=Terms(received_at=0.0, principal=who if self._scene.fair else ANYBODY),
            timeout_s=TIMEOUT_S,
        )

    async def ask(self, tenant: str, call: Call) -> Answer:
        """Send one request; follow it to its end."""
        clock = self._loop.time
        sent_at, ttft_s, outcome, num_tokens = clock(), 0.0, "complete", 0
        try:
            async with contextlib.aclosing(self._dispatcher.run(call)) as outputs:
                async for item in outputs:
                    ttft_s = ttft_s or clock() - sent_at
                    num_tokens += len(item.token_ids)
        except OverloadedError:
            outcome = "refused"
        except BatonError as error:
            outcome = type(error).__name__
        done_at = clock()
        cost = len(call.prompt_token_ids) * bool(ttft_s) + num_tokens
        return Answer(tenant, sent_at, outcome, ttft_s, done_at - sent_at, cost)


def play(scene: Scene) -> list[Answer]:
    """Play a scene; return the answers of all requests that came after the warm-up."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(_play(scene))
    finally:
        loop.close()


async def _play(scene: Scene) -> list[Answer]:
    options = SimOptions(block_size=64, num_blocks=6_500)
    async with joined_fleet(*scene.fleet, options, local_prefill=False) as pool:
        load = Load(pool, scene)
        began_at = asyncio.get_running_loop().time()
        share = capacity_per_s(scene.fleet[0], options) / NUM_TENANTS
        rates = {f"t{i}": scene.others_load * share for i in range(1, NUM_TENANTS)}
        if scene.greedy:
            rates["greedy"] = GREEDY_LOAD * share
        seconds = WARM_UP_S + scene.seconds
        arrivals = [load.arrive(tenant, rate, seconds) for tenant, rate in rates.items()]
        tasks = list(itertools.chain.from_iterable(await asyncio.gather(*arrivals)))
        await asyncio.gather(*(task for task in tasks if task.get_name() != "greedy"))
        for task in tasks:  # what is left is the greedy one's queue
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        answers = [answer for answer in found if isinstance(answer, Answer)]
        return [answer for answer in answers if answer.sent_at >= began_at + WARM_UP_S]


def capacity_per_s(num_prefill: int, options: SimOptions) -> float:
    """Return how many requests per second the prefill nodes can compute."""
    num_tokens = sum(PROMPT_TOKENS) // 2
    seconds = options.timing.prefill_s(num_tokens, num_tokens * (num_tokens + 1) // 2)
    return num_prefill / seconds


def p99_s(answers: Sequence[Answer]) -> float:
    """Return the 99th percentile of the times to the first token."""
    times = sorted(answer.ttft_s for answer in answers if answer.ttft_s)
    return statistics.quantiles(times, n=100, method="inclusive")[98]
