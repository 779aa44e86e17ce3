"""The other ways into LLM and AsyncLLM: streaming, chat, the progress bar, a step that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.errors import EngineDeadError, InvalidRequestError
from baton.api.sampling_params import SamplingParams
from engine import LLM
from engine.crash_dump import FOLDER_VARIABLE
from engine.executors.uniproc import worker_of
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.engine.fronts import FRONTS, Front, open_front

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
QUESTION = [{"role": "user", "content": "Write the function `is_empty(self)`: Return a bool."}]


@pytest.fixture(params=FRONTS)
def llm(request: pytest.FixtureRequest) -> Iterator[Front]:
    with open_front(request.param, str(DEMO_MODEL), dtype="float32", num_blocks=200) as made:
        yield made
        assert made.engine.block_pool.num_free == made.engine.num_blocks


def test_streamed_pieces_joined_are_the_completion(llm: Front) -> None:
    deltas = list(llm.stream("class Stack:\n", GREEDY))
    (whole,) = llm.generate("class Stack:\n", GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [t for delta in deltas for t in delta.token_ids] == list(whole.token_ids)
    assert [delta.output_index for delta in deltas] == list(range(len(whole.token_ids)))
    assert deltas[-1].finish_reason is whole.finish_reason
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_leaving_a_stream_ends_its_request(llm: Front) -> None:
    stream = llm.stream("class Stack:\n", GREEDY)
    next(stream)
    assert llm.engine.requests
    stream.close()
    assert not llm.engine.requests


def test_a_bad_prompt_is_refused_before_anything_runs(llm: Front) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        next(llm.stream("", GREEDY))
    with pytest.raises(InvalidRequestError, match="at least 1"):
        llm.generate(["fine", ""], GREEDY)
    assert llm.engine.num_steps == 0


def test_chat_is_generate_on_the_rendered_template(llm: Front) -> None:
    assert llm.tokenizer is not None
    (one,) = llm.chat(QUESTION, GREEDY)
    many = llm.chat([QUESTION, QUESTION], GREEDY)
    (expected,) = llm.generate([llm.tokenizer.encode_chat(QUESTION)], GREEDY)
    assert [one.token_ids, *(c.token_ids for c in many)] == [expected.token_ids] * 3


def test_the_progress_bar_counts_all_requests(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(DEMO_MODEL), dtype="float32", num_blocks=200)
    llm.generate(["a", "b", "c"], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert "3/3" in captured.err
    assert captured.out == ""


def test_a_step_that_fails_is_dumped_and_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = LLM(str(DEMO_MODEL), dtype="float32", num_blocks=50)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(worker_of(broken.engine.executor).runner, "launch", fail)
    with pytest.raises(EngineDeadError, match="a kernel failed"):
        broken.generate("import os", GREEDY)
    assert len(list(tmp_path.glob("baton-crash-*.json"))) == 1
    with pytest.raises(EngineDeadError, match="failed before"):
        broken.generate("import os", GREEDY)
