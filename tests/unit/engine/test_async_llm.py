"""AsyncLLM: several tasks and loops share one engine; cancelled tasks leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import EngineDeadError, InvalidRequestError, OverloadedError
from baton.api.outputs import Completion, FinishReason, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.api.structured_output import StructuredOutput
from engine import LLM, AsyncLLM
from engine.crash_dump import FOLDER_VARIABLE
from engine.executors.uniproc import worker_of
from tests.fakes.adapter_files import write_query_adapter
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.fronts import until

pytestmark = pytest.mark.medium  # event loops open sockets, grammars start a process
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 200}
PROMPTS = ["import os\n", "class Stack:\n", "def read_config(path):\n", "for line in"]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def seeded(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=10 + number, seed=number, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(DEMO_MODEL), **OPTIONS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    params = [seeded(number) for number in range(len(PROMPTS))]
    return LLM(str(DEMO_MODEL), **OPTIONS).generate(PROMPTS, params)


async def read(llm: AsyncLLM, number: int) -> list[TextDelta]:
    return [piece async for piece in llm.stream(PROMPTS[number], seeded(number))]


async def has_no_request(llm: AsyncLLM) -> None:
    """Wait for the engine's thread, then assert that no request is open."""
    await llm._thread.ask(lambda: None)
    assert llm.engine.requests == {}
    assert llm.engine.block_pool.num_free == llm.engine.num_blocks


def test_tasks_at_once_get_the_tokens_that_they_get_alone(
    llm: AsyncLLM, expected: list[Completion]
) -> None:
    async def run() -> None:
        streams = [read(llm, number) for number in range(len(PROMPTS))]
        wholes = [llm.generate(PROMPTS[number], seeded(number)) for number in range(len(PROMPTS))]
        pieces, completions = await asyncio.gather(
            asyncio.gather(*streams), asyncio.gather(*wholes)
        )
        assert [one.token_ids for (one,) in completions] == [one.token_ids for one in expected]
        assert ["".join(one.text for one in of) for of in pieces] == [one.text for one in expected]
        await has_no_request(llm)

    asyncio.run(run())


def test_several_loops_share_the_engine(llm: AsyncLLM, expected: list[Completion]) -> None:
    def in_a_loop_of_its_own(number: int) -> tuple[int, ...]:
        (completion,) = asyncio.run(llm.generate(PROMPTS[number], seeded(number)))
        return completion.token_ids

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = list(threads.map(in_a_loop_of_its_own, range(len(PROMPTS))))
    assert found == [one.token_ids for one in expected]


def test_several_outputs_come_with_their_numbers(llm: AsyncLLM) -> None:
    async def run() -> None:
        params = SamplingParams(max_tokens=5, n=3, seed=7, ignore_eos=True)
        whole = await llm.generate(PROMPTS[0], params)
        assert [one.choice_index for one in whole] == [0, 1, 2]
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for piece in llm.stream(PROMPTS[0], params):
            tokens[piece.choice_index] += piece.token_ids
        assert [tuple(one) for one in tokens.values()] == [one.token_ids for one in whole]

    asyncio.run(run())


@pytest.mark.parametrize("streams", [True, False])
def test_cancelling_a_task_ends_its_request(llm: AsyncLLM, streams: bool) -> None:
    async def run() -> None:
        async def wait() -> None:
            if streams:
                async for _ in llm.stream(PROMPTS[0], LONG):
                    pass
            else:
                await llm.generate(PROMPTS, LONG)

        task = asyncio.create_task(wait())
        requests = llm.engine.requests
        await until(lambda: any(one.num_output_tokens for one in list(requests.values())))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await has_no_request(llm)

    asyncio.run(run())


def test_abort_ends_one_output_with_the_tokens_so_far(llm: AsyncLLM) -> None:
    async def run() -> None:
        pieces = list[TextDelta]()
        async for piece in llm.stream(PROMPTS[0], LONG):
            pieces.append(piece)
            if len(pieces) == 3:
                await llm.abort(piece.request_id)
        assert pieces[-1].finish_reason is FinishReason.ABORT
        assert 3 <= sum(len(one.token_ids) for one in pieces) < LONG.max_tokens
        await llm.abort(pieces[-1].request_id)  # has ended: nothing happens
        await has_no_request(llm)

    asyncio.run(run())


def test_a_grammar_is_compiled_while_others_go_on_and_a_bad_one_raises(llm: AsyncLLM) -> None:
    async def run() -> None:
        one_of = StructuredOutput(choice=("yes", "no"))
        params = SamplingParams(max_tokens=8, n=2, seed=1, structured_output=one_of)
        found = await llm.generate("Answer: ", params)
        assert {one.text for one in found} <= {"yes", "no"}
        broken = SamplingParams(structured_output=StructuredOutput(regex="(("))
        with pytest.raises(InvalidRequestError, match="structured_output"):
            await asyncio.gather(llm.generate("x", broken), llm.generate(PROMPTS[0], seeded(0)))
        with pytest.raises(InvalidRequestError, match="structured_output"):
            await llm.generate(["x", "y"], [seeded(0), broken])
        await has_no_request(llm)

    asyncio.run(run())


def test_closing_ends_those_who_wait_and_refuses_others() -> None:
    async def run() -> None:
        async with AsyncLLM(str(DEMO_MODEL), **OPTIONS) as llm:
            waiting = asyncio.create_task(llm.generate(PROMPTS[0], LONG))
            await until(lambda: llm.engine.requests)
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.generate(PROMPTS[0])
        await llm.close()

    asyncio.run(run())


def test_a_step_that_fails_ends_all_calls_and_is_dumped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    async def run() -> None:
        async with AsyncLLM(str(DEMO_MODEL), **OPTIONS) as llm:
            monkeypatch.setattr(worker_of(llm.engine.executor).runner, "launch", fail)
            calls = [llm.generate(prompt) for prompt in PROMPTS]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(one) for one in found} == {EngineDeadError}
            with pytest.raises(EngineDeadError, match="a kernel failed"):
                await llm.generate("import os")

    asyncio.run(run())
    assert len(list(tmp_path.glob("baton-crash-*.json"))) == 1


@pytest.fixture(scope="module")
def embedder() -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(DEMO_MODEL), pooling="last", **OPTIONS)
    yield made
    asyncio.run(made.close())


def test_embeddings_and_scores_are_those_of_llm(embedder: AsyncLLM) -> None:
    alone = LLM(str(DEMO_MODEL), pooling="last", **OPTIONS)

    async def run() -> None:
        many = await asyncio.gather(*(embedder.embed([one, "x"]) for one in PROMPTS))
        scores = await embedder.score(PROMPTS[0], PROMPTS)
        for found, prompt in zip(many, PROMPTS, strict=True):
            assert [one.vector.tolist() for one in found] == [
                one.vector.tolist() for one in alone.embed([prompt, "x"])
            ]
        assert [one.score for one in scores] == [
            one.score for one in alone.score(PROMPTS[0], PROMPTS)
        ]
        with pytest.raises(InvalidRequestError, match="queries"):
            await embedder.score(PROMPTS[:2], PROMPTS)
        await has_no_request(embedder)

    asyncio.run(run())


def test_embeddings_that_wait_when_the_engine_closes_raise() -> None:
    async def run() -> None:
        llm = AsyncLLM(str(DEMO_MODEL), pooling="last", **OPTIONS)
        await llm.pause()
        waiting = asyncio.create_task(llm.embed("x"))
        await asyncio.sleep(0.05)
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        with pytest.raises(EngineDeadError):
            await llm.embed("y")

    asyncio.run(run())


def test_a_cancelled_embedding_leaves_nothing_behind(embedder: AsyncLLM) -> None:
    async def run() -> None:
        await embedder.pause()
        task = asyncio.create_task(embedder.embed(PROMPTS))
        await until(lambda: embedder.engine.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await has_no_request(embedder)
        await embedder.resume()

    asyncio.run(run())


def test_embeddings_that_wait_leave_threads_to_others(embedder: AsyncLLM) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await embedder.sleep()
        waiting = [asyncio.create_task(embedder.embed("x")) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # as `update_weights` and `close` do
        await embedder.wake()
        assert len(await asyncio.gather(*waiting)) == 3

    asyncio.run(run())


def test_an_adapter_that_lost_its_slot_does_not_end_the_engine(tmp_path: Path) -> None:
    names = {name: str(write_query_adapter(tmp_path, name, seed)) for seed, name in enumerate("ab")}

    async def run() -> None:
        options = {**OPTIONS, "max_adapters": 1, "pooling": "last"}
        async with AsyncLLM(str(DEMO_MODEL), **options) as llm:
            for name, folder in names.items():
                await llm.load_adapter(name, folder)
            before = [(await llm.embed("x", adapter=name))[0].vector for name in names]
            await llm.sleep("dropped")  # drops adapters, too
            with pytest.raises(OverloadedError, match="cannot be loaded while the engine sleeps"):
                await llm.load_adapter("b", names["b"])
            waiting = asyncio.create_task(llm.embed("x", adapter="a"))
            await asyncio.sleep(0.05)
            await llm.wake()
            assert (await waiting)[0].vector == before[0]
            both = [llm.embed("x", adapter=name) for name in "abababab"]
            for name, found in zip(
                "abababab", await asyncio.gather(*both, return_exceptions=True), strict=True
            ):
                if not isinstance(found, OverloadedError):
                    assert found[0].vector == before["ab".index(name)]  # type: ignore[index]
            assert (await llm.embed("x", adapter="a"))[0].vector == before[0]

    asyncio.run(run())
