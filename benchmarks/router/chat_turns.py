"""Chats: sessions that send their whole conversation at each turn, and a row of figures per turn.

Refuses to know: deployments, summaries.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.api.outputs import Receipt
from baton.v1 import admin_pb2

OPENING = "Tell me a long story. These words must be in it: "
OPENING_WORDS = 10
WORDS = (
    *("river", "lantern", "winter", "garden", "bridge", "letter", "silver"),
    *("window", "harbour", "music", "village", "candle", "ocean"),
)
TEMPERATURE = 0.8
LATER = 4  # the first turn that counts as a later turn
# A message may have more tokens than words: parts of words, and the chat template's own tokens.
TEMPLATE_TOKENS, TOKENS_PER_WORD = 40, 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The chats of one run.

    Attributes:
        sessions: chats at the same time.
        turns: number of turns of each chat.
        words: number of words of a user's message; a word is about one token.
        output_tokens: number of tokens of an answer.
        pause_s: mean pause between an answer and the next turn.
    """

    sessions: int = 6
    turns: int = 8
    words: int = 80
    output_tokens: int = 160
    pause_s: float = 1.0

    @property
    def chat_tokens(self) -> int:
        """Return an upper bound of the tokens of a whole chat."""
        message_tokens = round(TOKENS_PER_WORD * self.words) + TEMPLATE_TOKENS
        return self.turns * (message_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a chat, in milliseconds.

    Attributes:
        place: nodes that the policy chose, or the name of another server.
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
    num_computed: int
    num_reusable: int
    ttft_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    num_output: int
    num_fetched: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    expected_ms: float = 0.0
    measured_ms: float = 0.0
    places: dict[str, dict[str, float]] = field(default_factory=dict)
    num_sources: int = 0
    fetch: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one run, and the seconds from the first message to the last answer's end."""

    rows: Sequence[Turn]
    seconds: float


class Sessions(ABC):
    """All chats of one run, and a row per turn.

    Args:
        seed: draws the messages' words and the pauses; equal seeds give equal loads.
    """

    def __init__(self, load: Load, seed: int) -> None:
        self.rows: list[Turn] = []
        self._load, self._seed = load, seed

    async def play(self) -> Measured:
        """Run all chats to their ends."""
        began_at = time.perf_counter()
        await asyncio.gather(*(self._chat(number) for number in range(self._load.sessions)))
        return Measured(self.rows, time.perf_counter() - began_at)

    async def _chat(self, session: int) -> None:
        draw = random.Random(f"{self._seed} {session}")
        messages: list[dict[str, str]] = []
        num_before = 0
        for turn in range(1, self._load.turns + 1):
            await asyncio.sleep(draw.expovariate(1 / self._load.pause_s))
            words = " ".join(draw.choices(WORDS, k=self._load.words - OPENING_WORDS))
            messages.append({"role": "user", "content": OPENING + words})
            answer, row = await self._ask(messages, session, turn, num_before)
            messages.append({"role": "assistant", "content": answer})
            num_before = row.num_prompt + row.num_output
            self.rows.append(row)

    @abstractmethod
    async def _ask(
        self, messages: Sequence[dict[str, str]], session: int, turn: int, num_before: int
    ) -> tuple[str, Turn]:
        """Send one turn; return the answer and the turn's row.

        Args:
            num_before: tokens of the chat before this turn.
        """


class Chats(Sessions):
    """Chats with a router of Baton."""

    def __init__(self, client: AsyncClient, admin: Any, load: Load, seed: int) -> None:
        super().__init__(load, seed)
        self._client, self._admin = client, admin

    async def _ask(
        self, messages: Sequence[dict[str, str]], session: int, turn: int, num_before: int
    ) -> tuple[str, Turn]:
        request_id = f"{self._seed}-{session}-{turn}"
        num_output = self._load.output_tokens
        params = SamplingParams(
            max_tokens=num_output, min_tokens=num_output, temperature=TEMPERATURE, seed=turn
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
        return text, turn_of(decision, receipt, times, (session, turn, num_before))


def gaps_ms(times: Sequence[float]) -> list[float]:
    """Return the milliseconds between pieces of an answer.

    Args:
        times: seconds at which a turn was sent and each piece came.
    """
    return [1e3 * (after - before) for before, after in itertools.pairwise(times[1:])]


def turn_of(
    decision: Any, receipt: Receipt, times: Sequence[float], numbers: tuple[int, int, int]
) -> Turn:
    """Return the row of a turn.

    Args:
        times: when the turn was sent, and when each piece of the answer came.
        numbers: the session, the turn, and the tokens of the chat before the turn.
    """
    session, turn, num_before = numbers
    prefill, decode, forecast = receipt.prefill, receipt.decode, decision.forecast
    num_alone = decode.num_prompt_tokens_computed if decode else 0
    computing = prefill or decode
    gaps = gaps_ms(times)
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
        gap_p50_ms=statistics.median(gaps) if gaps else 0.0,
        gap_max_ms=max(gaps, default=0.0),
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
        fetch=_fetch_of(decision, computing),
    )


def _fetch_of(decision: Any, computing: Any) -> dict[str, float]:
    """Return the chosen source's expected times, and the measured wait; empty: no source."""
    return {
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
    }
