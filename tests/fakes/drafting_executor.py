"""An executor that proposes drafts, for tests of steps that sample several tokens per request.

The real workers compute and sample. Refuses to know: what is asserted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import StepHooks, StepPlan
from engine.executors.base import Executor, PendingStep


@dataclass(frozen=True, slots=True)
class ProposingStep:
    """A submitted step whose outcome gets drafts."""

    step: PendingStep
    propose: Callable[[ModelRunnerOutput], ModelRunnerOutput]

    def wait(self) -> ModelRunnerOutput:
        return self.propose(self.step.wait())


class DraftingExecutor:
    """Puts drafts behind what another executor samples: outputs known beforehand, partly wrong.

    Args:
        executor: computes the steps.
        outputs: of whole requests, by request id.
        num_drafts: most of one request in one step.
        wrong_every: one of so many positions gets a wrong draft.

    Attributes:
        num_accepted: drafts that were sampled.
        num_computed: drafts that were computed.
    """

    def __init__(
        self,
        executor: Executor,
        outputs: Mapping[str, Sequence[int]],
        num_drafts: int,
        wrong_every: int = 7,
    ) -> None:
        self.config, self.model_config = executor.config, executor.model_config
        self.dtype, self.max_model_len = executor.dtype, executor.max_model_len
        self.kv_memory, self.runs_ahead = executor.kv_memory, executor.runs_ahead
        self.num_accepted = self.num_computed = 0
        self._executor = executor
        self._outputs, self._num_drafts, self._wrong_every = outputs, num_drafts, wrong_every
        self._num_sampled: defaultdict[str, int] = defaultdict(int)

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        for start, num_tokens, num_known in zip(
            plan.shares[1::4], plan.shares[2::4], plan.shares[3::4], strict=True
        ):
            self.num_computed += max(start + num_tokens - num_known, 0)
        # As it would travel to a worker in another process.
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        return ProposingStep(self._executor.submit(travelled, hooks), self._propose)

    def _propose(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        for request_id, token_ids in output.sampled_token_ids.items():
            self.num_accepted += len(token_ids) - 1
            self._num_sampled[request_id] += len(token_ids)
            drafts = self._drafts(request_id)
            if drafts:
                output.draft_token_ids[request_id] = drafts
        return output

    def _drafts(self, request_id: str) -> tuple[int, ...]:
        first = self._num_sampled[request_id]
        known = self._outputs[request_id][first : first + self._num_drafts]
        return tuple(
            token_id ^ (position % self._wrong_every == 0)
            for position, token_id in enumerate(known, first)
        )

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        return self._executor.collective_rpc(method, args, timeout_s)

    def check_health(self) -> None:
        self._executor.check_health()

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        self._executor.on_failure(call)
