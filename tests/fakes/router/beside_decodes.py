"""Users of a deployment on virtual time, and the gaps that prompts cost their streams.

The real router and real node loops run over an executor that only takes time, that of a CPU with
two cores: a run gives the same numbers every time. Users send a prompt of 512 tokens for 64 tokens,
one after the other, with short pauses. The nodes do not take each other's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.api.sampling_params import SamplingParams
from benchmarks.fleet.virtual_fleet import MODEL, VirtualRouter, joined_fleet, on_virtual_time
from benchmarks.runner.answers import follow
from sim_node.options import SimOptions
from tests.fakes.router.prefill_estimate import CPU

CHUNK = 512
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
PROMPTS_OF_A_USER = 24
# Longest pause of a user. Without pauses all times would be equal, and requests would always meet
# the steps of a decode node at the same point.
LONGEST_PAUSE_S = 0.1
# Prefill nodes, and whether decode nodes may compute prompts.
SHAPES = {"colocated": (0, True), "split": (1, True), "split, no local prefill": (1, False)}


@dataclass(slots=True)
class Seen:
    """Times that users saw, in seconds.

    Attributes:
        gaps_s: times between two tokens.
        later_gaps_s: gaps without the one behind token 1 of each request. That gap is longer,
            because token 2 waits for a step of the decode node that has begun.
        num_alone: requests that a decode node served alone.
        elapsed_s: time until the last request ended.
    """

    gaps_s: list[float] = field(default_factory=list)
    later_gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    num_alone: int = 0
    elapsed_s: float = 0.0


def play(shape: str, num_users: int, tokens_beside: int) -> Seen:
    """Return what users saw of a deployment with one decode node."""
    return on_virtual_time(_play(shape, num_users, tokens_beside))


async def _play(shape: str, num_users: int, tokens_beside: int) -> Seen:
    seen = Seen()
    num_prefill, local_prefill = SHAPES[shape]
    options = SimOptions(
        timing=CPU, max_num_batched_tokens=CHUNK, prefill_tokens_beside_decodes=tokens_beside
    )
    async with joined_fleet(num_prefill, 1, options, local_prefill=local_prefill) as pool:
        router = VirtualRouter(pool, cpu_clock=lambda: 0.0)
        await asyncio.gather(*(_use(router, user, seen) for user in range(num_users)))
        seen.elapsed_s = asyncio.get_running_loop().time()
    return seen


async def _use(router: VirtualRouter, user: int, seen: Seen) -> None:
    draw = random.Random(user)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=1)
    for number in range(PROMPTS_OF_A_USER):
        prompt = draw.choices(range(1, int(MODEL["vocab_size"])), k=PROMPT_TOKENS)
        await asyncio.sleep(draw.uniform(0, LONGEST_PAUSE_S))
        call = router.call(prompt, params, request_id=f"{user}-{number}")
        answer = await follow(router.dispatcher.run(call))
        [decision] = router.dispatcher.placer.decisions.get(call.scoped_id)
        seen.num_alone += not decision.prefill_node
        seen.ttfts_s.append(answer.ttft_s)
        gaps_s = [after - before for before, after in itertools.pairwise(answer.times)]
        seen.gaps_s += gaps_s
        seen.later_gaps_s += gaps_s[1:]


def percentile(seconds: Sequence[float], part: float) -> float:
    """Return the time that this share of the times do not exceed."""
    return sorted(seconds)[int(part * (len(seconds) - 1))]
