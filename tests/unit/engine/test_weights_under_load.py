"""New weights in an `AsyncLLM` under load: no answer mixes two versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.api.errors import InvalidRequestError
from baton.api.outputs import Completion, FinishReason
from baton.api.sampling_params import SamplingParams
from baton.checkpoint.model_folder import weights_digest
from engine import LLM, AsyncLLM
from tests.fakes.checkpoints.versions import OPTIONS, PROMPTS, save_versions, tensors_of
from tests.fakes.engine.fronts import until

pytestmark = pytest.mark.medium  # event loops open sockets
LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
Expected = dict[str, list[tuple[int, ...]]]  # version -> tokens of each prompt


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_versions(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> Expected:
    return {
        weights_digest(one): [
            found.token_ids for found in LLM(str(one), **OPTIONS).generate(PROMPTS, LONG)
        ]
        for one in folders
    }


@asynccontextmanager
async def load(llm: AsyncLLM, found: list[tuple[int, Completion]]) -> AsyncIterator[None]:
    """Keep six prompts open, and note each prompt's number and completion."""
    is_over = False

    async def ask(seed: int) -> None:
        drawn = random.Random(seed)
        while not is_over:
            number = drawn.randrange(len(PROMPTS))
            (completion,) = await llm.generate(PROMPTS[number], LONG)
            found.append((number, completion))

    tasks = [asyncio.create_task(ask(seed)) for seed in range(6)]
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*tasks)


def versions_of(found: list[tuple[int, Completion]], expected: Expected) -> set[str]:
    """Assert that each completion is of the version that it names; return all versions."""
    for number, completion in found:
        if not completion.token_ids:  # aborted before its first token
            continue
        assert completion.metrics is not None
        whole = expected[completion.metrics.weights][number]
        is_whole = completion.finish_reason is FinishReason.LENGTH
        tokens = completion.token_ids
        assert tokens == (whole if is_whole else whole[: len(tokens)])
    return {completion.metrics.weights for _, completion in found if completion.metrics}


@pytest.mark.parametrize("num_updates", [10, pytest.param(100, marks=pytest.mark.large)])
@pytest.mark.parametrize("when", ["drain", "abort"])
def test_no_answer_mixes_versions(
    folders: tuple[Path, Path], expected: Expected, num_updates: int, when: str
) -> None:
    async def run() -> None:
        found: list[tuple[int, Completion]] = []
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm, load(llm, found):
            for number in range(num_updates):
                folder = folders[(number + 1) % 2]
                num_found = len(found)
                source = tensors_of(folder).items() if number % 3 == 2 else folder
                assert await llm.update_weights(source, when=when) == weights_digest(folder)
                await until(lambda least=num_found + 2: len(found) >= least)  # type: ignore[misc]  # keeps the value
        assert versions_of(found, expected) == set(expected)
        reasons = {completion.finish_reason for _, completion in found}
        assert (FinishReason.ABORT in reasons) is (when == "abort")

    asyncio.run(run())


def test_requests_wait_while_the_engine_sleeps_or_pauses(
    folders: tuple[Path, Path], expected: Expected
) -> None:
    old = expected[weights_digest(folders[0])]

    async def run() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            for level in ("host", "dropped"):
                open_one = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
                await until(lambda: llm.engine.requests)
                await llm.sleep(level)
                assert (await open_one)[0].token_ids == old[0]
                waiting = asyncio.create_task(llm.generate(PROMPTS, LONG))
                cancelled = asyncio.create_task(llm.generate(PROMPTS, LONG))
                await asyncio.sleep(0.02)
                cancelled.cancel()
                assert not llm.engine.requests
                await llm.wake()
                assert [one.token_ids for one in await waiting] == old
            await llm.pause()
            waiting = asyncio.create_task(llm.generate(PROMPTS, LONG))
            await until(lambda: llm.engine.requests)
            assert not waiting.done()
            with pytest.raises(InvalidRequestError, match=r"when: must be abort while .* paused"):
                await llm.update_weights(folders[1])
            await llm.resume()
            assert [one.token_ids for one in await waiting] == old

    asyncio.run(run())


def test_a_refused_or_cancelled_update_leaves_the_old_weights(
    folders: tuple[Path, Path], expected: Expected
) -> None:
    async def run() -> None:
        found: list[tuple[int, Completion]] = []
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm, load(llm, found):
            tensors = tensors_of(folders[1])
            tensors["model.norm.weight"][0] = float("nan")
            with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight: has a number"):
                await llm.update_weights(tensors.items())
            await llm._thread.ask(lambda: None)
            first = asyncio.create_task(llm.update_weights(folders[1]))
            await until(lambda: llm._current)
            with pytest.raises(InvalidRequestError, match="engine: is changing already"):
                await llm.sleep()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert llm.weights in expected  # too late to be cancelled, perhaps
            await llm.update_weights(folders[0])
        assert versions_of(found, expected) <= set(expected)
        assert llm.weights == weights_digest(folders[0])

    asyncio.run(run())
