"""Contract of architectures: an engine gives the same tokens as an independent implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.sampling_params import SamplingParams
from engine import LLM

MAX_TOKENS = 12


class ArchitectureContract:
    """Tests of an architecture, which use one of its checkpoints.

    Attributes:
        model: folder of the checkpoint, which should be small because it is loaded several times.
        prompts: prompts to complete, as token ids.
    """

    model = ""
    prompts: Sequence[Sequence[int]] = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), (5,), (7, 8))

    def expected(self, prompt: Sequence[int], num_tokens: int) -> Sequence[int]:
        """Return the greedy tokens of an independent implementation, such as transformers."""
        raise NotImplementedError

    def test_greedy_tokens_are_those_of_the_other_implementation(self) -> None:
        found = self._greedy()
        for prompt, tokens in zip(self.prompts, found, strict=True):
            assert tokens == tuple(self.expected(prompt, MAX_TOKENS))

    def test_chunks_block_sizes_and_batches_change_no_token(self) -> None:
        whole = self._greedy()
        assert self._greedy(block_size=32) == whole
        assert self._greedy(max_num_batched_tokens=4, max_num_requests=4) == whole
        assert self._greedy(max_num_requests=1) == whole

    def _greedy(self, **options: Any) -> list[tuple[int, ...]]:
        llm = LLM(self.model, dtype="float32", **options)
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        try:
            return [one.token_ids for one in llm.generate([[*p] for p in self.prompts], params)]
        finally:
            llm.engine.close()
