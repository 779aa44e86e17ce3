"""Crash dump: complete, without users' tokens, and never the cause of another failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from engine import LLM
from engine.crash_dump import FOLDER_VARIABLE, dump_crash

DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32", num_blocks=64)


def test_a_dump_says_what_ran_and_who_held_which_blocks(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    request = llm._make_choices("import os\n" * 10, SamplingParams(max_tokens=4))[0]
    llm.engine.add(request)
    llm.engine.step()
    path = dump_crash(llm.engine, RuntimeError("the floor is lava"))
    assert path is not None
    dump = json.loads(path.read_text(encoding="utf-8"))
    assert "the floor is lava" in dump["error"][-1]
    assert dump["scheduled"] == [
        {"request_id": request.request_id, "num_tokens": request.num_prompt_tokens}
    ]
    (described,) = dump["requests"]
    assert described["status"] == "RUNNING"
    assert set(dump["blocks"]["ref_counts"]) == {str(b) for b in described["block_ids"]}
    assert "token_ids" not in described
    assert dump["metrics"]["requests_running"] == 1
    assert dump["metrics"]["prompt_tokens_computed_total"] == request.num_prompt_tokens
    llm.engine.abort(request.request_id)


def test_a_dump_that_cannot_be_written_raises_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "missing"))
    assert dump_crash(llm.engine, RuntimeError("again")) is None
