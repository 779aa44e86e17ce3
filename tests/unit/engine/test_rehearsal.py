"""Unit tests of the rehearsal: which steps are computed first, and that no request notices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import SHARE, StepHooks, StepPlan
from engine.engine import Engine
from engine.executors.base import PendingStep
from engine.rehearsal import rehearse
from tests.fakes.engine.demo_engine import answer, load_demo


@dataclass(frozen=True, slots=True)
class Done:
    """A step that has been computed."""

    output: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        return self.output


class Noted:
    """Notes the steps of an engine, and what became of them."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        self.hooks: list[StepHooks] = []
        self.outputs: list[ModelRunnerOutput] = []
        self._submit = engine.executor.submit
        monkeypatch.setattr(engine.executor, "submit", self.submit)

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        self.plans.append(plan)
        self.hooks.append(hooks)
        self.outputs.append(self._submit(plan, hooks).wait())
        return Done(self.outputs[-1])

    def kinds(self) -> set[tuple[int, bool]]:
        """Return the steps by their number of requests, and whether they compute prompts."""
        return {(plan.num_requests, plan.shares[2] > 1) for plan in self.plans}


def test_prompts_and_decodes_of_one_and_several_requests_sample_in_every_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = load_demo()
    noted = Noted(engine, monkeypatch)
    rehearse(engine)
    assert noted.kinds() == {(1, True), (1, False), (6, True), (6, False)}
    assert len(noted.plans) == 4, "a start must not take much longer for it"


def test_a_node_that_never_decodes_rehearses_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo()
    noted = Noted(engine, monkeypatch)
    rehearse(engine, decodes=False)
    assert noted.kinds() == {(1, True), (6, True)}
    params = {new.sampling_params for plan in noted.plans for new in plan.new_rows}
    assert {one.temperature for one in params} == {0, 1}
    assert any(one.top_p < 1 and one.top_k and one.min_p for one in params)
    assert any(one.repetition_penalty != 1 and one.logit_bias for one in params)
    assert any(output.logprobs and output.prompt_logprobs for output in noted.outputs)
    assert all(len(output.sampled_token_ids) == plan.num_requests
               for plan, output in zip(noted.plans, noted.outputs, strict=True))  # fmt: skip


def test_a_mask_of_the_whole_vocabulary_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo()
    noted = Noted(engine, monkeypatch)
    rehearse(engine)
    masked = [
        (plan, hooks)
        for plan, hooks in zip(noted.plans, noted.hooks, strict=True)
        if plan.constrained
    ]
    assert masked
    for plan, hooks in masked:
        allowed = hooks.allowed_bits()
        assert set(allowed) == set(plan.constrained)
        for [bits] in allowed.values():
            tokens = np.unpackbits(bits, bitorder="little")[: engine.model_config.vocab_size]
            assert len(tokens) == engine.model_config.vocab_size
            assert tokens.all()


def test_small_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_demo(max_num_requests=1, max_num_batched_tokens=4, max_model_len=8)
    noted = Noted(engine, monkeypatch)
    rehearse(engine)
    assert noted.kinds() == {(1, True), (1, False)}
    assert all(len(plan.token_ids) <= 4 for plan in noted.plans)
    assert all(plan.shares[1] + plan.shares[2] <= 8 for plan in noted.plans)
    assert all(len(plan.shares) == SHARE for plan in noted.plans)


@pytest.mark.parametrize(
    "options", [{}, {"speculative_method": "ngram"}, {"async_scheduling": True}]
)
def test_answers_and_counts_are_as_without_a_rehearsal(options: dict[str, Any]) -> None:
    plain, rehearsed = load_demo(**options), load_demo(**options)
    rehearse(rehearsed)
    assert rehearsed.num_steps == 0
    assert rehearsed.metrics().step_tokens_total == 0
    assert answer(rehearsed) == answer(plain)
    rehearsed.check()
