"""Beam searches of `AsyncLLM`: those of `LLM`, also if the weights change meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import InvalidRequestError, RequestCancelledError
from engine import LLM, AsyncLLM
from tests.fakes.adapter_files import write_query_adapter
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.checkpoints.versions import OPTIONS, PROMPTS, save_versions
from tests.fakes.engine.fronts import until

pytestmark = pytest.mark.medium  # event loops open sockets
BEAMS: dict[str, Any] = {"beam_width": 3, "max_tokens": 8, "length_penalty": 0.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_versions(tmp_path_factory.mktemp("versions"))


def test_searches_of_several_tasks_are_those_of_llm(folders: tuple[Path, Path]) -> None:
    expected = LLM(str(folders[0]), **OPTIONS).beam_search(PROMPTS, **BEAMS)

    async def run() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            alone = [llm.beam_search(prompt, **BEAMS) for prompt in PROMPTS]
            together, *found = await asyncio.gather(llm.beam_search(PROMPTS, **BEAMS), *alone)
            assert together == expected
            assert [one for [one] in found] == expected
            with pytest.raises(InvalidRequestError, match="beam_width: must be a whole number"):
                await llm.beam_search(PROMPTS, beam_width=0)

    asyncio.run(run())


@pytest.mark.parametrize("num_old", [1, 5])
def test_a_search_has_tokens_of_one_version_of_the_weights(
    folders: tuple[Path, Path], num_old: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (LLM(str(one), **OPTIONS).beam_search(PROMPTS, **BEAMS) for one in folders)
    assert old != new

    async def run() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            complete, steps = llm._complete, []

            async def then_update(*arguments: Any) -> Any:
                found = await complete(*arguments)
                steps.append(found)
                if len(steps) == num_old:
                    await llm.update_weights(str(folders[1]))
                return found

            monkeypatch.setattr(llm, "_complete", then_update)
            assert await llm.beam_search(PROMPTS, **BEAMS) == new
            assert len(steps) > num_old

    asyncio.run(run())


def test_a_search_has_tokens_of_one_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter gets the name of the search's adapter between two steps."""
    old, new = (write_query_adapter(tmp_path, f"a{seed}", seed) for seed in (1, 2))
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 100, "max_adapters": 2}
    alone = LLM(str(DEMO_MODEL), **options, adapters={"old": old, "new": new})
    expected = [alone.beam_search(PROMPTS, **BEAMS, adapter=name) for name in ("old", "new")]
    assert expected[0] != expected[1]

    async def run() -> None:
        async with AsyncLLM(str(DEMO_MODEL), **options, adapters={"a": old}) as llm:
            complete, steps = llm._complete, []

            async def then_replace(*arguments: Any) -> Any:
                found = await complete(*arguments)
                steps.append(found)
                if len(steps) == 2:
                    await llm.load_adapter("a", new)
                return found

            monkeypatch.setattr(llm, "_complete", then_replace)
            assert await llm.beam_search(PROMPTS, **BEAMS, adapter="a") == expected[1]

    asyncio.run(run())


def test_a_change_that_aborts_and_a_cancelled_task_end_a_search(
    folders: tuple[Path, Path],
) -> None:
    async def run() -> None:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            for ending in ("abort", "cancel"):
                task = asyncio.create_task(llm.beam_search(PROMPTS, max_tokens=200))
                await until(lambda: llm.engine.requests)
                if ending == "cancel":
                    task.cancel()
                while not task.done():  # a change between two steps only delays the search
                    await llm.sleep(when="abort")
                    await llm.wake()
                with pytest.raises((RequestCancelledError, asyncio.CancelledError)):
                    await task
                await llm._thread.ask(lambda: None)
                assert llm.engine.requests == {}

    asyncio.run(run())
