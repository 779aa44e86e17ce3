"""The chats of `chat_places` with llama.cpp's server, through OpenAI's client.

Each session has a slot of the server, so that no session takes the cached chat of another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from baton.processes.free_address import free_address
from benchmarks.router.chat_turns import TEMPERATURE, Load, Measured, Sessions, Turn, gaps_ms
from benchmarks.served.served_servers import NAME, SERVERS, Job, running

PEER = "llamacpp"  # name of the server, and of the shape
REQUEST_LIMIT_S = 600.0


class PeerChats(Sessions):
    """Chats with a server that has OpenAI's API and llama.cpp's extensions."""

    def __init__(self, client: AsyncOpenAI, load: Load, seed: int) -> None:
        super().__init__(load, seed)
        self._client = client

    async def _ask(
        self, messages: Sequence[dict[str, str]], session: int, turn: int, num_before: int
    ) -> tuple[str, Turn]:
        sent: Any = list(messages)
        times, text, usage, timings = [time.perf_counter()], "", None, dict[str, Any]()
        stream = await self._client.chat.completions.create(
            model=NAME,
            messages=sent,
            max_tokens=self._load.output_tokens,
            temperature=TEMPERATURE,
            seed=turn,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "cache_prompt": True, "id_slot": session},
        )
        async for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                times.append(time.perf_counter())
                text += piece
            usage = chunk.usage or usage
            timings = (chunk.model_extra or {}).get("timings") or timings
        assert usage is not None
        assert len(times) > 1, "the answer has no text"
        gaps, num_computed = gaps_ms(times), int(timings["prompt_n"])
        return text, Turn(
            session=session,
            turn=turn,
            place=PEER,
            num_prompt=usage.prompt_tokens,
            num_cached=usage.prompt_tokens - num_computed,
            num_computed=num_computed,
            num_reusable=num_before,
            ttft_ms=1e3 * (times[1] - times[0]),
            gap_p50_ms=statistics.median(gaps) if gaps else 0.0,
            gap_max_ms=max(gaps, default=0.0),
            num_output=usage.completion_tokens,
        )


def measure_peer(gguf: Path, load: Load, seed: int) -> Measured:
    """Run all chats over a new server, with a slot for each session and a thread for each core.

    Raises:
        RuntimeError: the server ends, or does not answer in time.
        subprocess.CalledProcessError: the server cannot be built.
    """

    async def play(url: str) -> Measured:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=REQUEST_LIMIT_S, max_retries=0
        ) as client:
            return await PeerChats(client, load, seed).play()

    job = Job(
        gguf.parent,
        "auto",
        free_address(),
        tuple(sorted(os.sched_getaffinity(0))),
        gguf=gguf.resolve(),
        num_slots=load.sessions,
        slot_tokens=load.chat_tokens,
    )
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running(SERVERS[PEER], job, Path(folder) / "log") as live,
    ):
        return asyncio.run(play(live.url))
