"""Contract of proposers: their drafts, right or wrong, do not change any token of an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from baton.api.sampling_params import SamplingParams
from engine import LLM

MAX_TOKENS = 16


class ProposerContract:
    """Tests of a proposer.

    Attributes:
        method: name of the proposer, for ``speculative_method``.
        model: a model folder or hub id; the model should be small, because each test loads it.
        prompts: prompts to complete, as token ids.
        options: further options of the engine.
    """

    method = ""
    model = ""
    prompts: Sequence[Sequence[int]] = ((1, 2, 3, 1, 2, 3, 1, 2), (5, 6, 7))
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def test_speculation_changes_no_token(self) -> None:
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True),
            SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=7, ignore_eos=True),
        ]
        asked = [list(prompt) for prompt in self.prompts for _ in params]
        of_each = params * len(self.prompts)
        plain = LLM(self.model, **self.options)
        expected = [one.token_ids for one in plain.generate(asked, of_each)]
        plain.engine.close()
        for num_drafts in (1, 4):
            drafting = LLM(
                self.model,
                speculative_method=self.method,
                num_speculative_tokens=num_drafts,
                adaptive_speculation=False,
                **self.options,
            )
            found = [one.token_ids for one in drafting.generate(asked, of_each)]
            assert found == expected, f"{num_drafts} drafts change tokens"
            assert drafting.metrics().drafts_total > 0, "the proposer proposed nothing"
            drafting.engine.close()
