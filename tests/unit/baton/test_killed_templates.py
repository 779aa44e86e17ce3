"""Kill the template process of both users of worker processes at work: no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psutil
import pytest

from baton.api.structured_output import StructuredOutput
from baton.text.grammar_trials import GrammarTrials
from baton.text.tokenizer import Tokenizer
from router.intake.texts import SHORT_TEXT_CHARS, Texts
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

pytestmark = pytest.mark.medium

NUM_REQUESTS = 120


async def ask_while_templates_are_killed(ask: Callable[[int], Awaitable[object]]) -> list[object]:
    """Ask many times at once; kill the template when a tenth and when half are done."""
    others = set(psutil.Process().children())
    asked = [asyncio.ensure_future(ask(number)) for number in range(NUM_REQUESTS)]
    for num_done in (NUM_REQUESTS // 10, NUM_REQUESTS // 2):
        while sum(one.done() for one in asked) < num_done:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        [template] = set(psutil.Process().children()) - others
        template.kill()
        while template in psutil.Process().children():  # noqa: ASYNC110  # until another template runs
            await asyncio.sleep(0.002)
    return list(await asyncio.gather(*asked))


def test_texts_that_a_killed_template_was_to_read() -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    texts = Texts(tokenizer, max_model_len=100_000)

    async def run() -> None:
        prompts = [f"{number} " + "word " * SHORT_TEXT_CHARS for number in range(NUM_REQUESTS)]

        def ask(number: int) -> Awaitable[object]:
            return texts.encode(prompts[number], max_model_len=100_000, caller=f"{number % 5}")

        answers = await ask_while_templates_are_killed(ask)
        assert answers == [tokenizer.encode(prompt) for prompt in prompts]

    try:
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        texts.close()


def test_grammars_that_a_killed_template_was_to_try() -> None:
    trials = GrammarTrials(DEMO_MODEL)

    async def run() -> None:
        def ask(number: int) -> Awaitable[object]:
            grammar = StructuredOutput(regex=f"[a-z]{{{number + 1}}}")
            return trials.run(grammar, caller=f"{number % 5}")

        assert len(await ask_while_templates_are_killed(ask)) == NUM_REQUESTS

    try:
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        trials.close()
