"""Chats over a real prefill and decode node: where each turn goes, what was expected, what it took.

Sessions chat at the same time with SmolLM2, through `baton up`'s processes and policy `cost`. Each
turn sends the whole conversation, as text, through the chat template. A shape is written as in
`baton loadtest compare`: "1:1+local" lets the decode node compute prompts, "colocated:2" has two
decode nodes and no prefill node. In a shape with "+fetch", nodes have the option --fetch-prefixes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.api.outputs import Receipt
from baton.checkpoint.packaged_model import SMOLLM2
from baton.v1 import admin_pb2
from benchmarks.runner.deployments import deployed
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Document, Run
from examples.demo import fetch_model
from loadtest.load.shapes import Deployment

SHAPES = ("1:1+local", "colocated:1", "2:2", "2:2+fetch")
OPENING = "Tell me a long story. These words must be in it: "
WORDS = (
    *("river", "lantern", "winter", "garden", "bridge", "letter", "silver"),
    *("window", "harbour", "music", "village", "candle", "ocean"),
)
FETCH = "+fetch"  # ending of a shape
LATER = 4  # the first turn that counts as a later turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Load of each run.

    Attributes:
        shapes: deployments, measured in turns.
        repeats: number of times that each shape is measured.
        sessions: chats at the same time.
        turns: number of turns of each chat.
        words: number of words of a user's message; a word is about one token.
        output_tokens: number of tokens of an answer.
        pause_s: mean pause between an answer and the next turn.
        lend: whether nodes lend idle cores, as with `baton up`; only for a machine without other
            work.
    """

    shapes: Sequence[str] = SHAPES
    repeats: int = 2
    sessions: int = 6
    turns: int = 8
    words: int = 80
    output_tokens: int = 160
    pause_s: float = 1.0
    lend: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat, in milliseconds.

    Attributes:
        place: nodes that the policy chose.
        num_cached: prompt tokens that the node that computed the prompt had in its cache.
        num_fetched: number of these tokens that another node sent.
        num_computed: prompt tokens that the nodes computed.
        num_reusable: prompt tokens that a decode node with the whole earlier chat would have.
        parts: the parts of the time to the first token, as receipts call them, and the wait for a
            fetch, which is a part of the queue on the node that computed the prompt.
        expected_ms: the forecast of the time to the first token, without the transfer.
        places: terms of the cost of each place that the policy considered.
        num_sources: number of nodes that could send a prefix.
        fetch: the chosen source's expected times to fetch and to compute, and the measured wait;
            empty: no source was chosen.
    """

    session: int
    turn: int
    place: str
    num_prompt: int
    num_cached: int
    num_fetched: int
    num_computed: int
    num_reusable: int
    ttft_ms: float
    parts: dict[str, float]
    expected_ms: float
    measured_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    num_output: int
    places: dict[str, dict[str, float]]
    num_sources: int
    fetch: dict[str, float]


class Chats:
    """Sends all chats of one run, and keeps a row per turn.

    Args:
        draw: the messages' words and the pauses; equal seeds give equal loads.
    """

    def __init__(self, client: AsyncClient, admin: Any, options: Options, seed: int) -> None:
        self.rows: list[Turn] = []
        self._client, self._admin, self._options, self._seed = client, admin, options, seed

    async def chat(self, session: int) -> None:
        draw = random.Random(f"{self._seed} {session}")
        messages: list[dict[str, str]] = []
        num_before = 0
        for turn in range(1, self._options.turns + 1):
            await asyncio.sleep(draw.expovariate(1 / self._options.pause_s))
            words = " ".join(draw.choices(WORDS, k=self._options.words - 10))
            messages.append({"role": "user", "content": OPENING + words})
            answer, num_before = await self._ask(messages, session, turn, num_before)
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self, messages: Sequence[dict[str, str]], session: int, turn: int, num_before: int
    ) -> tuple[str, int]:
        """Send one turn; return the answer, and the length of the chat up to it in tokens."""
        request_id = f"{self._seed}-{session}-{turn}"
        num_output = self._options.output_tokens
        params = SamplingParams(
            max_tokens=num_output, min_tokens=num_output, temperature=0.8, seed=turn
        )
        times, text, receipt = [time.perf_counter()], "", None
        async for delta in self._client.stream(
            messages, params, request_id=request_id, session_id=f"{self._seed}-{session}"
        ):
            times.append(time.perf_counter())
            text += delta.text
            receipt = delta.receipt or receipt
        assert receipt is not None
        request = admin_pb2.ExplainRequest(request_id=request_id)
        [*_, decision] = (await asyncio.to_thread(self._admin.Explain, request)).decisions
        self.rows.append(turn_of(decision, receipt, times, (session, turn, num_before)))
        return text, receipt.num_prompt_tokens + receipt.num_output_tokens


def turn_of(
    decision: Any, receipt: Receipt, times: Sequence[float], of: tuple[int, int, int]
) -> Turn:
    """Return the row of a turn.

    Args:
        times: when the turn was sent, and when each piece of the answer came.
        of: the session, the turn, and the tokens of the chat before it.
    """
    session, turn, num_before = of
    prefill, decode, forecast = receipt.prefill, receipt.decode, decision.forecast
    num_alone = decode.num_prompt_tokens_computed if decode else 0
    computing = prefill or decode
    gaps_ms = [1e3 * (after - before) for before, after in itertools.pairwise(times[1:])]
    return Turn(
        session=session,
        turn=turn,
        place=f"{decision.prefill_node or '-'} {decision.decode_node}",
        num_prompt=receipt.num_prompt_tokens,
        num_cached=receipt.num_prompt_tokens - num_alone
        if prefill is None
        else prefill.num_cached_tokens,
        num_fetched=computing.num_fetched_tokens if computing else 0,
        num_computed=num_alone if prefill is None else prefill.num_computed_tokens,
        num_reusable=num_before,
        ttft_ms=1e3 * (times[1] - times[0]),
        parts={
            name.removesuffix("_s"): 1e3 * seconds
            for name, seconds in (
                *receipt.ttft_parts.items(),
                ("fetch_wait_s", computing.fetch_wait_s if computing else 0.0),
            )
        },
        expected_ms=forecast.wait_ms + forecast.compute_ms,
        measured_ms=forecast.measured_wait_ms + forecast.measured_compute_ms,
        gap_p50_ms=statistics.median(gaps_ms) if gaps_ms else 0.0,
        gap_max_ms=max(gaps_ms, default=0.0),
        num_output=receipt.num_output_tokens,
        places={
            f"{one.prefill_node or '-'} {one.decode_node}": {
                "tokens": one.num_computed_tokens,
                "cost_ms": one.cost,
                **{term.name: term.value for term in one.terms},
            }
            for one in decision.candidates
        },
        num_sources=len(decision.prefix_sources),
        fetch={
            name: value
            for one in decision.prefix_sources
            if one.is_chosen and computing
            for name, value in (
                ("tokens", one.num_tokens),
                ("fetch_ms", one.fetch_ms),
                ("compute_ms", one.compute_ms),
                ("measured_ms", 1e3 * computing.fetch_wait_s),
                ("lost", computing.num_fetches_lost),
            )
        },
    )


def measure(gguf: str, shape: str, options: Options, seed: int) -> list[Turn]:
    """Run all chats over a new deployment of this shape."""
    wanted = Deployment.parse(shape.removesuffix(FETCH))
    local = () if wanted.is_local_allowed else ("--no-local-prefill",)

    async def play(address: str, admin: Any) -> list[Turn]:
        async with AsyncClient(address) as client:
            for word in ("warm", "up", "now"):
                await client.generate(word, SamplingParams(max_tokens=8))
            chats = Chats(client, admin, options, seed)
            await asyncio.gather(*(chats.chat(number) for number in range(options.sessions)))
            return chats.rows

    with (
        deployed(
            gguf,
            router_args=("--policy", "cost", *local),
            num_prefill=wanted.num_prefill,
            num_decode=wanted.num_decode,
            node_args=("--fetch-prefixes",) if shape.endswith(FETCH) else (),
            lend_cores=options.lend,
        ) as deployment,
        admin_of(deployment.config.listen) as admin,
    ):
        return asyncio.run(play(deployment.config.listen, admin))


def summarize(rows: Sequence[Turn], num_turns: int) -> dict[str, Any]:
    """Summarize all runs of a shape."""
    later = [row for row in rows if row.turn >= min(LATER, num_turns)]
    alone = [row for row in later if row.place.startswith("-")]

    def ttft_ms(turn: int) -> float:
        return statistics.median(row.ttft_ms for row in rows if row.turn == turn)

    def part_ms(name: str) -> float:
        return statistics.median(row.parts.get(name, 0.0) for row in later)

    return {
        "ttft_p50_turn_4_ms": round(ttft_ms(min(LATER, num_turns)), 1),
        "ttft_p50_last_turn_ms": round(ttft_ms(num_turns), 1),
        "ttft_p50_later_ms": round(statistics.median(row.ttft_ms for row in later), 1),
        "ttft_parts_p50_later_ms": {
            name: round(part_ms(name), 1)
            for name in dict.fromkeys(name for row in later for name in row.parts)
        },
        "later_turns": len(later),
        "later_turns_alone": len(alone),
        "computed_per_later_turn": round(statistics.fmean(row.num_computed for row in later), 1),
        "fetched_per_later_turn": round(statistics.fmean(row.num_fetched for row in later), 1),
        "new_per_later_turn": round(
            statistics.fmean(row.num_prompt - row.num_reusable for row in later), 1
        ),
        "gap_p50_ms": round(statistics.median(row.gap_p50_ms for row in rows), 2),
        "gap_max_p50_ms": round(statistics.median(row.gap_max_ms for row in rows), 1),
    }


def show(run: Run, shape: str, rows: Sequence[Turn]) -> None:
    """Print a line per turn, with the terms of each place in whole milliseconds."""
    run.console.print(f"[bold]{shape}[/]")
    for row in sorted(rows, key=lambda row: (row.turn, row.session)):
        run.console.print(
            f"turn {row.turn} of {row.session}: {row.place}; prompt {row.num_prompt}, cached "
            f"{row.num_cached} ({row.num_fetched} fetched), computed {row.num_computed}, chat so "
            f"far {row.num_reusable}; TTFT {row.ttft_ms:.0f} ms, expected {row.expected_ms:.0f}, "
            f"measured {row.measured_ms:.0f}"
        )
        if row.fetch:
            parts = ", ".join(f"{name} {value:.0f}" for name, value in row.fetch.items())
            run.console.print(f"    fetch: {parts}", style="dim", soft_wrap=True)
        for place, terms in row.places.items():
            parts = ", ".join(
                f"{name.removesuffix('_ms').replace('_', ' ')} {value:.0f}"
                for name, value in terms.items()
            )
            run.console.print(f"    {place}: {parts}", style="dim", soft_wrap=True)


def run(run: Run, options: Options) -> Document:
    """Measure the shapes in turns."""
    gguf = fetch_model(run.console, SMOLLM2)
    if gguf is None:
        raise SystemExit("the model cannot be had")
    found: dict[str, list[Turn]] = {shape: [] for shape in options.shapes}
    for seed in range(options.repeats):
        for shape in options.shapes:
            rows = measure(gguf, shape, options, seed)
            show(run, shape, rows)
            found[shape] += rows
    return {
        "load": asdict(options),
        "results": {shape: summarize(rows, options.turns) for shape, rows in found.items()},
    }
