"""Unit tests of files for models with windows and states, and for nodes with several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from engine.kv_files.file_tier import KVFileTier
from tests.fakes.time.waiting import wait_until
from tests.numerics.tiny_models import make_hugging_face_model, save

WINDOWS, STATES = "Gemma3ForCausalLM", "Lfm2ForCausalLM"
SIZE = 16
PROMPT = [5 + (7 * i) % 50 for i in range(6 * SIZE + 3)]
NUM_OUT = 2 * SIZE
ANSWER = SamplingParams(max_tokens=NUM_OUT, temperature=0, ignore_eos=True)


def load(folder: Path, files: Path | None, **options: Any) -> LLM:
    options = {"dtype": "float32", "block_size": SIZE, "num_blocks": 96, "num_threads": 1} | options
    if files is not None:
        options["kv_files"] = str(files)
    llm = LLM(str(folder), **options)
    if files is not None:
        tier_of(llm)._clock = lambda: 0.0  # no read is late
        wait_until(tier_of(llm)._is_scanned.is_set, "the folder is listed")
    return llm


def tier_of(llm: LLM) -> KVFileTier:
    assert llm.engine.features.files is not None
    return llm.engine.features.files


def answer(llm: LLM, prompt: list[int]) -> list[int]:
    return list(llm.generate([prompt], ANSWER)[0].token_ids)


def say_turns(num_turns: int, folder: Path, files: Path, **options: Any) -> list[int]:
    """Answer a conversation's turns, with a restart before each turn; return the last prompt."""
    plain, turns = load(folder, None), [PROMPT]
    while len(turns) < num_turns:
        turns.append([*turns[-1], *answer(plain, turns[-1]), *PROMPT[:50]])
    for number, prompt in enumerate(turns):
        llm = load(folder, files, **options)
        assert answer(llm, prompt) == answer(plain, prompt)
        # The answer's last token was not computed.
        known = (len(turns[number - 1]) + NUM_OUT - 1) // SIZE * SIZE if number else 0
        assert llm.metrics().cached_prompt_tokens_total == known, tier_of(llm).counts().misses
        counts = tier_of(llm).counts()
        assert (counts.hits, counts.tokens_read) == (bool(number), known)
        llm.engine.close()
        assert tier_of(llm).counts().runs["written"] > 0
        assert sum(llm.engine.block_pool.ref_counts().values()) <= 1  # the null block
        llm.engine.block_pool.check()
    plain.engine.close()
    return turns[-1]


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [(WINDOWS, {}), (STATES, {"layer_types": ["conv", "full_attention"]})],
)
def test_a_restarted_engine_reads_windows_and_states(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = make_hugging_face_model(architecture, max_position_embeddings=512, **fields)
    folder = save(model, tmp_path)
    say_turns(3, folder, tmp_path / "files")


def test_a_lost_window_is_written_again(tmp_path: Path) -> None:
    folder = save(make_hugging_face_model(WINDOWS, max_position_embeddings=512), tmp_path)
    files, prompt = tmp_path / "files", PROMPT
    for num_hits in (0, 0, 1):
        llm = load(folder, files)
        said = answer(llm, prompt)
        assert tier_of(llm).counts().hits == num_hits
        llm.engine.close()
        if prompt is PROMPT and tier_of(llm).counts().runs["written"] == 2:
            for path in files.rglob("*.1/*/*.kv"):  # the group with a window
                path.unlink()
        else:
            prompt = [*PROMPT, *said, *PROMPT[:50]]


@pytest.mark.parametrize(
    "size",
    ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.large)],
)
def test_each_rank_has_files_with_its_part(size: str, tmp_path: Path) -> None:
    folder = save(make_hugging_face_model(WINDOWS, max_position_embeddings=512), tmp_path)
    prompt = say_turns(2, folder, tmp_path / "files", **{size: 2})
    folders = {path.name for path in (tmp_path / "files").iterdir() if path.is_dir()}
    assert len(folders) == 4, "two ranks have two groups of layers each"
    for path in (tmp_path / "files").rglob("*-1/*/*.kv"):  # numbers of one rank
        path.write_bytes(path.read_bytes()[:-1])
    llm = load(folder, tmp_path / "files", **{size: 2})
    said = answer(llm, prompt)
    counts = tier_of(llm).counts()
    assert (counts.hits, counts.misses["short"]) == (0, 2)
    llm.engine.close()
    plain = load(folder, None)
    assert answer(plain, prompt) == said
    plain.engine.close()
