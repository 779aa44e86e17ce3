"""EngineWriter: answers of the real engine in one process, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.api.sampling_params import SamplingParams
from engine import LLM
from tests.fuzz.answer_writers.base import Written

_MAX_REQUESTS = 128


class EngineWriter:
    """Has an engine answer.

    Args:
        folder: has the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(
            str(folder), dtype="float32", num_threads=1, num_blocks=6000,
            max_num_requests=_MAX_REQUESTS,
        )  # fmt: skip

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self._llm.engine.eos_token_ids)

    def check(self, params: SamplingParams) -> None:
        self._llm.engine.features.grammars.compile_for(params)

    def write(self, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Written]:
        done = self._llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        return [Written(tuple(one.token_ids), one.finish_reason) for one in done]
