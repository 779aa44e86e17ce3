"""Send streamed requests to an OpenAI-compatible server, and time each received piece of text.

A seed gives every server the same prompts. Lines of a stream are stored with their times, and
parsed only after the stream's end. Refuses to know: which server answers, and how it was started.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.text.tokenizer import Tokenizer

ALONE_AT_LEAST = 3  # minimum number of requests or chats of a single user, however long they take
REQUEST_LIMIT_S = 240.0
_MAX_ERROR_CHARS = 200

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load: when requests arrive, and how long they are.

    Attributes:
        prompt_tokens: number of tokens of each prompt, or of each user message in a chat.
        output_tokens: number of tokens of each output.
        num_streams: number of users, each with one open request at a time; 0: requests arrive at
            ``rate``.
        rate: requests per second, if there are no users.
        turns: number of user messages of a chat, which sends its whole history at each turn; 0:
            completions.
        num_requests: number of requests; 0: as many as arrive in the given seconds.
        even: whether arrivals are evenly spaced; false: they are a Poisson process.
        as_text: whether prompts are sent as text, whose number of tokens varies slightly; false:
            prompts are token ids.
    """

    prompt_tokens: int
    output_tokens: int
    num_streams: int = 0
    rate: float = 0.0
    turns: int = 0
    num_requests: int = 0
    even: bool = False
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one streamed request.

    Attributes:
        turn: number of the chat's turn, from 1; 0: the request is a completion.
        times: arrival time of each piece of text, on the clock of ``sent_at``.
        num_tokens: number of output tokens by the server's count.
        error: text of the error; "": no error.
    """

    turn: int
    sent_at: float
    times: tuple[float, ...]
    num_tokens: int
    text: str
    error: str = ""


@dataclass(slots=True)
class Played:
    """The answers to one load.

    Attributes:
        began_at: time of the first request.
        ended_at: time at which the first user ended; until then, all users were active.
    """

    began_at: float
    ended_at: float = math.inf
    answers: list[Answer] = field(default_factory=list)


class Prompts:
    """Makes new prompts, which are cut from random places of one text.

    Args:
        token_ids: the text's tokens.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], seed: int) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._random = random.Random(seed)

    def draw_ids(self, num_tokens: int) -> list[int]:
        """Return a prompt of ``num_tokens`` tokens."""
        start = self._random.randrange(len(self._token_ids))
        text = itertools.islice(itertools.cycle(self._token_ids), start, start + num_tokens)
        return list(text)

    def draw_text(self, num_tokens: int) -> str:
        """Return a prompt as a text of about ``num_tokens`` tokens."""
        return self._tokenizer.decode(self.draw_ids(num_tokens))


# ---------------------------------------------------------------- one request


def parse(pieces: Sequence[tuple[float, bytes]], turn: int, sent_at: float) -> Answer:
    """Parse the stored lines of a stream; return the answer."""
    times, texts, num_tokens, error = list[float](), list[str](), 0, ""
    for at, line in pieces:
        try:
            event = json.loads(line.removeprefix(b"data:"))
            for choice in event.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content")
                if text:
                    times.append(at)
                    texts.append(text)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            error = str(event.get("error") or error)
        except (ValueError, AttributeError) as unreadable:
            error = f"cannot read {line[:80]!r}: {unreadable}"
    if not error and (not times or not num_tokens):
        error = "the stream had no text" if not times else "the stream had no usage"
    return Answer(turn, sent_at, tuple(times), num_tokens, "".join(texts), error[:_MAX_ERROR_CHARS])


async def send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], turn: int = 0
) -> Answer:
    """Send one request, read its stream to the end, and return the answer."""
    pieces = list[tuple[float, bytes]]()
    data = json.dumps(body).encode()
    sent_at = time.perf_counter()
    try:
        async with session.post(url, data=data) as response:
            if response.status != 200:
                said = (await response.text())[:_MAX_ERROR_CHARS]
                return Answer(turn, sent_at, (), 0, "", f"HTTP {response.status}: {said}")
            async for line in response.content:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    pieces.append((time.perf_counter(), line))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Answer(turn, sent_at, (), 0, "", f"{type(error).__name__}: {error}")
    return parse(pieces, turn, sent_at)


class Player:
    """Plays one load against one server.

    Args:
        url: URL of the server, without a path.
        model: the server's name of the model.
        seconds: for how long requests arrive, unless the load has a number of requests.
    """

    def __init__(self, url: str, model: str, load: Load, prompts: Prompts, seconds: float) -> None:
        self._url = url
        self._load = load
        self._prompts = prompts
        self._seconds = seconds
        self._num_left = load.num_requests or math.inf
        self._shared: dict[str, Any] = {
            "model": model, "max_tokens": load.output_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    async def play(self) -> Played:
        """Play the load until its last answer has ended."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        headers = {"Content-Type": "application/json"}
        # A server may close an idle connection at the moment when the next request is written.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers
        ) as session:
            played = Played(began_at=time.perf_counter())
            if self._load.num_streams:
                users = (self._use(session, played) for _ in range(self._load.num_streams))
                await asyncio.gather(*users)
            else:
                await self._arrive(session, played)
        return played

    async def _use(self, session: aiohttp.ClientSession, played: Played) -> None:
        """Act as one user: send requests or chats one by one, and note when the user ends."""
        at_least = ALONE_AT_LEAST if self._load.num_streams == 1 else 1
        for number in itertools.count():
            now = time.perf_counter()
            has_time = now < played.began_at + self._seconds or self._load.num_requests
            if self._num_left <= 0 or (number >= at_least and not has_time):
                played.ended_at = min(played.ended_at, now)
                return
            self._num_left -= 1
            if self._load.turns:
                await self._chat(session, played)
            else:
                played.answers.append(await self._complete(session))

    async def _arrive(self, session: aiohttp.ClientSession, played: Played) -> None:
        """Send requests at their arrival times, whether earlier requests have ended or not."""
        tasks = list[asyncio.Task[Answer]]()
        for after_s in self.draw_arrivals():
            await asyncio.sleep(max(0.0, played.began_at + after_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._complete(session)))
        played.answers.extend(await asyncio.gather(*tasks))
        played.ended_at = time.perf_counter()

    def draw_arrivals(self) -> list[float]:
        """Draw the arrival times of the requests, in seconds; the first time is 0."""
        drawn = random.Random(round(1000 * self._load.rate))
        times = [0.0]
        while True:
            gap = 1 / self._load.rate if self._load.even else drawn.expovariate(self._load.rate)
            is_last = len(times) == self._load.num_requests or (
                not self._load.num_requests and times[-1] + gap > self._seconds
            )
            if is_last:
                return times
            times.append(times[-1] + gap)

    async def _complete(self, session: aiohttp.ClientSession) -> Answer:
        size = self._load.prompt_tokens
        draw = self._prompts.draw_text if self._load.as_text else self._prompts.draw_ids
        body = self._shared | {"prompt": draw(size)}
        return await send(session, f"{self._url}/v1/completions", body)

    async def _chat(self, session: aiohttp.ClientSession, played: Played) -> None:
        """Hold one chat, which ends early after a failed answer."""
        messages = list[dict[str, str]]()
        for turn in range(1, self._load.turns + 1):
            text = self._prompts.draw_text(self._load.prompt_tokens)
            messages.append({"role": "user", "content": text})
            body = self._shared | {"messages": messages}
            answer = await send(session, f"{self._url}/v1/chat/completions", body, turn)
            played.answers.append(answer)
            if answer.error:
                return
            messages.append({"role": "assistant", "content": answer.text})


# ---------------------------------------------------------------- what is told of a load


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lies, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(played: Played, load: Load, reported_turn: int) -> Numbers:
    """Return a load's figures, with times in ms; an output of wrong length is an error.

    A figure that no answer has is left out. ``itl`` is the gap between two pieces of text, and
    ``tpot`` the mean time per token after the first token of an answer.
    """
    good = [one for one in played.answers if not one.error and one.num_tokens == load.output_tokens]
    numbers: Numbers = {
        "num_requests": len(played.answers),
        "num_errors": len(played.answers) - len(good),
        "tokens_per_s": _tokens_until_end(played, good) / (played.ended_at - played.began_at),
    }
    first = [1000 * (one.times[0] - one.sent_at) for one in good]
    gaps = [1000 * (b - a) for one in good for a, b in itertools.pairwise(one.times)]
    turn = [1000 * (one.times[0] - one.sent_at) for one in good if one.turn == reported_turn]
    means = [
        1000 * (one.times[-1] - one.times[0]) / (one.num_tokens - 1)
        for one in good
        if one.num_tokens > 1
    ]
    for name, values in (("ttft", first), ("itl", gaps), ("tpot", means)):
        if values:
            numbers[f"{name}_p50_ms"] = percentile(values, 0.5)
            numbers[f"{name}_p99_ms"] = percentile(values, 0.99)
            numbers[f"{name}_mean_ms"] = statistics.fmean(values)
    if load.turns and turn:
        numbers[f"turn_{reported_turn}_ttft_p50_ms"] = percentile(turn, 0.5)
    return {name: round(value, 3) for name, value in numbers.items()}


def _tokens_until_end(played: Played, answers: Sequence[Answer]) -> float:
    """Count the tokens that arrived before the first user ended.

    All pieces of an answer count as equally many tokens.
    """
    return sum(
        one.num_tokens * sum(at <= played.ended_at for at in one.times) / len(one.times)
        for one in answers
    )


def first_error(played: Played, load: Load) -> str:
    """Return the first error; "" if there was none."""
    for one in played.answers:
        if one.error:
            return one.error
        if one.num_tokens != load.output_tokens:
            return f"an output has {one.num_tokens} tokens, not {load.output_tokens}"
    return ""
