"""Loads that compare the router's estimates of prompts and decode steps with simulated nodes.

Three kinds of load (chats of 8 turns, prompts of 512 tokens, prompts of 2,048 to 8,192) run on two
kinds of machine (a GPU, two cores of a CPU), with one prefill and one decode node, on virtual time:
a run gives the same numbers every time. The terms of the policy's choice, as they were then, stand
beside the time from then until token 1 came. A request may have waited at the router's gate before
that. Decode steps are compared as the router measures them, eight at a time, also under a fourth
load: waves of 1 to 24 requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.link.words import NodeRole
from benchmarks.fleet.virtual_fleet import MODEL, VirtualRouter, joined_cluster, on_virtual_time
from router.calls.call import Call
from router.fleet.load.measured_line import MeasuredLine
from router.policies.base import Placement
from sim_node.cluster import SimCluster
from sim_node.options import SimOptions
from sim_node.timing import TimingModel, preset

# Two cores and a model of 0.6B parameters: 0.8 to 1.1 ms per prompt token.
CPU = TimingModel(
    prefill_tokens_per_s=1200,
    prefill_step_s=0.010,
    prefill_s_per_pair=8e-8,
    decode_step_s=0.014,
    decode_s_per_request=0.001,
    decode_s_per_kv_token=1e-6,
    kv_bytes_per_token=114_688,
    link_bytes_per_s=5e9,
    link_latency_s=0.001,
)
NUM_TURNS, PREFIX_TOKENS = 8, 96
PREFILL_NODE, COLD_FACTOR = "sim-p0", 8.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The nodes' machine, and the load that suits it.

    Attributes:
        chunk: most tokens of a step.
        num_chats: chats at the same time.
        pause_s: mean time between an answer and the next turn.
        rate: prompts of 512 tokens per second; long prompts come at an eighth of this rate.
    """

    timing: TimingModel
    chunk: int
    num_chats: int
    pause_s: float
    rate: float


MACHINES = {
    "gpu": Machine(preset("h100-8b"), 8192, 12, 1.0, 20.0),
    "cpu": Machine(CPU, 512, 2, 3.0, 1.2),
}
LOADS = ("chat", "512", "long")
WAVES = (1, 4, 24, 2, 12)


@dataclass(frozen=True, slots=True)
class Placed:
    """One request: where it went, and its time until token 1, in seconds.

    Attributes:
        turn: number of the turn in its chat, from 1; 0 in other loads.
        expected_s: expected time from its placement on, by the chosen place's terms.
        measured_s: measured time from its placement on.
        ttft_s: time to the first token, with the wait at the gate.
    """

    turn: int
    num_tokens: int
    is_alone: bool
    is_probe: bool
    expected_s: float
    measured_s: float
    ttft_s: float

    @property
    def ratio(self) -> float:
        """Expected time divided by measured time."""
        return self.expected_s / self.measured_s


class Player:
    """Sends requests through one router, and keeps their outcomes.

    The prefill node is `COLD_FACTOR` times as slow until the first answer begins.
    """

    def __init__(self, router: VirtualRouter, random_: random.Random, cluster: SimCluster) -> None:
        self.placed: list[Placed] = []
        self.step_ratios: list[float] = []
        self._cluster = cluster
        cluster.slow(PREFILL_NODE, COLD_FACTOR)
        self._router, self._random = router, random_
        self._placed_at: dict[str, float] = {}  # by request id
        place = router.dispatcher.placer.place

        def place_at(call: Call, *args: Any, **options: Any) -> Placement | None:
            self._placed_at[call.request_id] = asyncio.get_running_loop().time()
            return place(call, *args, **options)

        router.dispatcher.placer.place = place_at  # type: ignore[method-assign]

    def watch_steps(self, line: MeasuredLine) -> None:
        """Record a decode node's expectation before each measurement is added to its line."""
        measure = line.measure

        def watched(units: float, seconds: float) -> None:
            self.step_ratios.append(line.seconds(units) / seconds)
            measure(units, seconds)

        line.measure = watched  # type: ignore[method-assign]

    def text(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1, int(MODEL["vocab_size"])) for _ in range(num_tokens)]

    async def send(self, prompt: Sequence[int], max_tokens: int, turn: int = 0) -> list[int]:
        """Return the tokens of the answer."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        call = self._router.call(list(prompt), params)
        clock = asyncio.get_running_loop().time
        began_s, first_s, answer = clock(), None, list[int]()
        async with contextlib.aclosing(self._router.dispatcher.run(call)) as outputs:
            async for item in outputs:
                if first_s is None:
                    first_s = clock()
                    self._cluster.slow(PREFILL_NODE, 1.0)
                answer += item.token_ids
        assert first_s is not None
        [decision] = self._router.dispatcher.placer.decisions.get(call.scoped_id)
        terms = decision.candidates[0].terms
        names = ("prefill_queue_ms", "local_queue_ms", "prefill_ms", "beside_ms")
        self.placed.append(
            Placed(
                turn,
                len(prompt),
                not decision.prefill_node,
                getattr(decision, "is_probe", False),
                sum(terms.get(name, 0.0) for name in names) / 1e3,
                first_s - self._placed_at.pop(call.request_id),
                first_s - began_s,
            )
        )
        return answer

    async def chat(self, machine: Machine, prefix: Sequence[int]) -> None:
        """Play one chat, in which each turn contains all earlier turns."""
        prompt = list(prefix)
        for turn in range(1, NUM_TURNS + 1):
            await asyncio.sleep(self._random.expovariate(1 / machine.pause_s))
            prompt += self.text(self._random.randint(30, 130))
            prompt += await self.send(prompt, 64, turn)


def play(
    load: str,
    machine: Machine,
    *,
    num_requests: int = 96,
    seed: int = 1,
    local_prefill: bool = True,
) -> list[Placed]:
    """Play requests of a load; return them in the order of their first tokens."""
    player = on_virtual_time(_play(load, machine, num_requests, seed, local_prefill))
    return player.placed


def play_steps(load: str, machine: Machine) -> list[float]:
    """Play a load; return expected over measured times of its decode steps, in order."""
    player = on_virtual_time(_play(load, machine, 96, seed=1, local_prefill=False))
    return player.step_ratios


async def _play(
    load: str, machine: Machine, num_requests: int, seed: int, local_prefill: bool
) -> Player:
    draw = random.Random(seed)
    options = SimOptions(timing=machine.timing, max_num_batched_tokens=machine.chunk)
    async with joined_cluster(1, 1, options, local_prefill=local_prefill) as joined:
        player = Player(VirtualRouter(joined.pool), draw, joined.cluster)
        for node in joined.pool.nodes:
            if node.registration.role is NodeRole.DECODE:
                player.watch_steps(node.load.step)
        if load == "chat":
            prefix = player.text(PREFIX_TOKENS)
            for _ in range(num_requests // NUM_TURNS // machine.num_chats):
                chats = (player.chat(machine, prefix) for _ in range(machine.num_chats))
                await asyncio.gather(*chats)
            return player
        if load == "waves":
            for number in WAVES:
                await asyncio.gather(*(player.send(player.text(200), 96) for _ in range(number)))
            return player
        rate = machine.rate / (8 if load == "long" else 1)
        jobs = []
        for _ in range(num_requests):
            await asyncio.sleep(draw.expovariate(rate))
            num_tokens = draw.randint(2048, 8192) if load == "long" else 512
            jobs.append(asyncio.create_task(player.send(player.text(num_tokens), 64)))
        await asyncio.gather(*jobs)
        return player


def learnt(placed: Sequence[Placed]) -> Sequence[Placed]:
    """Return those behind the first sixth."""
    return placed[len(placed) // 6 :]
