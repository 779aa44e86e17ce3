"""Unit tests of `LLM` and `AsyncLLM` with sessions: what is kept and read ahead, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, AsyncLLM, SamplingParams
from baton.api.errors import InvalidRequestError
from engine.engine import Engine
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.time.waiting import wait_until

PROMPT = [5 + (7 * i) % 200 for i in range(8 * 16 + 3)]  # eight blocks
ANSWER = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1, "pin_share": 0.5}


def forget(engine: Engine) -> None:
    """Wait until the last answer is in a file; then lose all cached blocks."""
    files = engine.features.files
    assert files is not None
    wait_until(lambda: files.counts().runs["written"] == 1, "the answer is written")
    engine.block_pool.reset_prefix_cache()


def reads_have_ended(engine: Engine) -> bool:
    files = engine.features.files
    assert files is not None
    assert files._reads
    return all(read.has_ended for read in files._reads)


def num_pins_made(llm: LLM) -> int:
    return llm.engine.features.pins.counts.made


def test_a_session_is_read_ahead_until_it_is_dropped(tmp_path: Path) -> None:
    llm = LLM(str(DEMO_MODEL), kv_files=str(tmp_path), **OPTIONS)
    said = llm.generate([PROMPT], ANSWER, session="agent")[0].token_ids
    forget(llm.engine)
    llm.prefetch("another", ttl_s=60)
    assert num_pins_made(llm) == 0
    llm.prefetch("agent", ttl_s=60)
    wait_until(lambda: reads_have_ended(llm.engine), "the files are read")
    assert num_pins_made(llm) == 1
    prompt = [*PROMPT, *said, 9]
    streamed = [piece.token_ids for piece in llm.stream(prompt, ANSWER, session="agent")]
    assert llm.metrics().cached_prompt_tokens_total == 9 * 16
    llm.drop_pins("agent")
    assert llm.engine.features.pins.counts.dropped == 1
    llm.prefetch("agent", ttl_s=60)
    assert num_pins_made(llm) == 1, "a dropped session is unknown"
    plain = LLM(str(DEMO_MODEL), **OPTIONS)
    assert plain.generate([prompt], ANSWER)[0].token_ids == tuple(sum(streamed, ()))
    llm.engine.close()


def test_tasks_pin_and_read_ahead_by_session(tmp_path: Path) -> None:
    async def talk() -> None:
        async with AsyncLLM(str(DEMO_MODEL), kv_files=str(tmp_path), **OPTIONS) as llm:
            await llm.generate([PROMPT], ANSWER, session=["agent"])
            await asyncio.to_thread(forget, llm.engine)
            await llm.prefetch("agent", ttl_s=60)
            async for _ in llm.stream([*PROMPT, 9], ANSWER, session="other", pin_s=30):
                pass
            assert llm.metrics().cached_prompt_tokens_total == 8 * 16
            pins = llm.engine.features.pins
            sessions = {pin.session for own in pins._owners.values() for pin in own.pins.values()}
            assert len(sessions) == 2
            for session in ("agent", "other"):
                await llm.drop_pins(session)
            assert not pins._owners
            with pytest.raises(InvalidRequestError, match=r"^session: is needed"):
                await llm.prefetch("", ttl_s=60)

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda llm: llm.prefetch("", ttl_s=1.0), "session: is needed"),
        (lambda llm: llm.drop_pins(""), "session: is needed"),
        (lambda llm: llm.prefetch("s", ttl_s=0.0), "ttl_s: must be above 0 and at most 604800"),
        (
            lambda llm: llm.generate([[5], [6]], session=["s"]),
            r"session: must be one or 2 \(one per prompt\), got 1",
        ),
        (lambda llm: llm.generate([[5]], pin_s=-1), "pin_s: must be above 0 and at most 604800"),
    ],
)
def test_wrong_hints_are_refused(
    call: Callable[[LLM], object], problem: str, refusing: LLM
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{problem}"):
        call(refusing)
    assert not refusing.engine.requests


@pytest.fixture(scope="module")
def refusing() -> LLM:
    return LLM(str(DEMO_MODEL), **OPTIONS)
