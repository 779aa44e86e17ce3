"""Pinned sessions: agents that come back after a tool's pause, while others fill the memory.

Agents send a first turn, wait for their tools, and send the next turn. Meanwhile, other clients
send new prompts, whose KV is several times what the nodes' memory holds. The runs: agents alone
(idle), with others, and with others while the agents' turns are pinned. The router's and the nodes'
code is real (`virtual_fleet.py`); time is virtual, so a run gives the same figures on any machine.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.api.sampling_params import SamplingParams
from baton.kv.pins import PinTerms, PrefixPin
from benchmarks.fleet.virtual_fleet import VirtualRouter, joined_fleet, on_virtual_time
from benchmarks.runner.answers import Answer, follow
from benchmarks.runner.run import Document, Run
from sim_node.options import SimOptions
from sim_node.timing import preset

VOCABULARY = 1000
PINS = PinTerms(owner=b"agents", prefixes=(PrefixPin(600.0),))
SPREAD_S = 10.0  # the agents' first turns are spread over these seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Load of each run.

    Attributes:
        agents: number of agents.
        agent_tokens: prompt tokens of an agent's first turn.
        new_tokens: prompt tokens that the next turn adds.
        pause_s: seconds from the end of a turn to the next turn.
        times: KV of the others' prompts, as a multiple of what the memory of a node holds.
        other_tokens: prompt tokens of another client's request.
        num_blocks: KV blocks of each node, of 16 tokens.
        timing: preset of the simulated hardware.
    """

    agents: int = 50
    agent_tokens: int = 500
    new_tokens: int = 100
    pause_s: float = 60.0
    times: float = 3.0
    other_tokens: int = 1500
    num_blocks: int = 8_000
    timing: str = "h100-8b"


@dataclass(frozen=True, slots=True)
class Played:
    """The answers of one run: the agents' second turns, and the others' requests."""

    second_turns: Sequence[Answer]
    others: Sequence[Answer]


async def play(options: Options, *, has_others: bool, pins: PinTerms | None) -> Played:
    """Run the agents, and the other clients if there are any."""
    sizes = SimOptions(
        timing=preset(options.timing), num_blocks=options.num_blocks, max_num_batched_tokens=2048
    )
    async with joined_fleet(1, 1, sizes, local_prefill=True) as pool:
        router, draw = VirtualRouter(pool), random.Random(1)

        async def ask(prompt: list[int], **terms: Any) -> Answer:
            params = SamplingParams(max_tokens=32, ignore_eos=True, seed=1)
            return await follow(router.dispatcher.run(router.call(prompt, params, **terms)))

        async def act(number: int, start_s: float) -> Answer:
            rng = random.Random(f"agent {number}")
            prompt = rng.choices(range(VOCABULARY), k=options.agent_tokens)
            await asyncio.sleep(start_s)
            await ask(prompt, pins=pins, session_id=str(number))
            await asyncio.sleep(options.pause_s)
            prompt += rng.choices(range(VOCABULARY), k=options.new_tokens)
            return await ask(prompt, pins=pins, session_id=str(number))

        async def send_other(number: int, start_s: float) -> Answer:
            await asyncio.sleep(start_s)
            rng = random.Random(f"other {number}")
            return await ask(rng.choices(range(VOCABULARY), k=options.other_tokens))

        agents = [act(number, draw.uniform(0, SPREAD_S)) for number in range(options.agents)]
        num_others = round(options.times * options.num_blocks * 16 / options.other_tokens)
        until_s = SPREAD_S + options.pause_s
        others = [
            send_other(number, draw.uniform(0, until_s))
            for number in range(num_others * has_others)
        ]
        answers = await asyncio.gather(*agents, *others)
        return Played(answers[: options.agents], answers[options.agents :])


def summarize(played: Played) -> dict[str, float]:
    """Summarize a run; the others' figures are missing if there were none."""
    ttfts = [answer.ttft_s for answer in played.second_turns]
    receipts = [answer.receipt for answer in played.second_turns if answer.receipt]
    num_failed = sum(
        answer.outcome != "complete" for answer in (*played.second_turns, *played.others)
    )
    row = {
        "ttft_p50_ms": 1e3 * statistics.median(ttfts),
        "ttft_p99_ms": 1e3 * _p99(ttfts),
        "cached_per_turn": statistics.fmean(one.num_cached_tokens for one in receipts),
        "num_failed": float(num_failed),
    }
    if played.others:
        others = [answer.ttft_s for answer in played.others]
        gaps = [answer.longest_gap_s for answer in played.others]
        row["others"] = float(len(others))
        row["others_ttft_p50_ms"] = 1e3 * statistics.median(others)
        row["others_ttft_p99_ms"] = 1e3 * _p99(others)
        row["others_gap_p99_ms"] = 1e3 * _p99(gaps)
    return {name: round(value, 1) for name, value in row.items()}


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def run(run: Run, options: Options) -> Document:
    """Play all runs, and compare them."""
    runs: dict[str, tuple[bool, PinTerms | None]] = {
        "agents alone": (False, None),
        "with others": (True, None),
        "with others, pinned": (True, PINS),
    }
    results = {}
    for name, (has_others, pins) in runs.items():
        results[name] = summarize(on_virtual_time(play(options, has_others=has_others, pins=pins)))
        run.show(name, {name: results[name]})
    alone, plain, pinned = results.values()
    ratios = {
        "pinned_ttft_p50_to_alone": pinned["ttft_p50_ms"] / alone["ttft_p50_ms"],
        "unpinned_ttft_p50_to_alone": plain["ttft_p50_ms"] / alone["ttft_p50_ms"],
        "others_ttft_p99_to_no_pins": pinned["others_ttft_p99_ms"] / plain["others_ttft_p99_ms"],
    }
    return {
        "load": asdict(options),
        "results": results,
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
    }
