"""An executor that proposes drafts, for tests of steps that sample several tokens per request.

The real workers compute and sample. Refuses to know: what is asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from baton.adapters.files import Adapter, AdapterFiles
from engine.core.outputs import ModelRunnerOutput
from engine.core.step_plan import SHARE, StepHooks, StepPlan
from engine.executors.base import Executor, PendingStep

# Whole outputs by request id, or a part of each; empty for a request that is missing.
Outputs = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ProposingStep:
    """A submitted step to whose result drafts are added."""

    step: PendingStep
    propose: Callable[[ModelRunnerOutput], None]

    def wait(self) -> ModelRunnerOutput:
        output = self.step.wait()
        self.propose(output)
        return output


class DraftingExecutor:
    """Adds drafts to another executor's samples: known outputs, some of them made wrong.

    Each request gets another number of drafts in each step, from none to the most. Where a draft is
    wrong, those behind it are what would be right if it were.

    Args:
        executor: computes the steps.
        outputs: the outputs of requests, known beforehand.
        num_drafts: most drafts of one request in one step.
        wrong_every: every position divisible by this gets a wrong draft; 0: none does.

    Attributes:
        num_accepted: drafts that were sampled.
        num_computed: drafts that were computed.
    """

    def __init__(
        self, executor: Executor, outputs: Outputs, num_drafts: int, wrong_every: int = 7
    ) -> None:
        self.config, self.model_config = executor.config, executor.model_config
        self.dtype, self.max_model_len = executor.dtype, executor.max_model_len
        self.linear_weights = executor.linear_weights
        self.kv_memory, self.runs_ahead = executor.kv_memory, executor.runs_ahead
        self.num_accepted = self.num_computed = 0
        self._executor = executor
        self._outputs, self._num_drafts, self._wrong_every = outputs, num_drafts, wrong_every
        self._rows: dict[int, tuple[str, int]] = {}  # by row: whose it is, tokens of its prompt

    def submit(self, plan: StepPlan, hooks: StepHooks) -> PendingStep:
        for new in plan.new_rows:
            self._rows[new.row] = new.request_id, new.num_prompt_tokens
        sampled_at: dict[str, int] = {}
        for place in range(0, len(plan.shares), SHARE):
            row, start, num_tokens, num_known = plan.shares[place : place + SHARE]
            request_id, num_prompt_tokens = self._rows[row]
            sampled_at[request_id] = num_known - num_prompt_tokens
            self.num_computed += max(start + num_tokens - num_known, 0)

        def propose(output: ModelRunnerOutput) -> None:
            for request_id, token_ids in output.sampled_token_ids.items():
                self.num_accepted += len(token_ids) - 1
                drafts = self._drafts(request_id, sampled_at[request_id] + len(token_ids))
                if drafts:
                    output.draft_token_ids[request_id] = drafts

        # As it would travel to a worker in another process.
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        return ProposingStep(self._executor.submit(travelled, hooks), propose)

    def _drafts(self, request_id: str, first: int) -> tuple[int, ...]:
        """Return drafts for the output positions from ``first`` on, some of them wrong."""
        num_drafts = (first * 7 + len(request_id)) % (self._num_drafts + 1)
        known = self._outputs(request_id)[first : first + num_drafts]
        return tuple(
            abs(token_id - bool(self._wrong_every and position % self._wrong_every == 0))
            for position, token_id in enumerate(known, first)
        )

    def check_adapter(self, files: AdapterFiles) -> None:
        self._executor.check_adapter(files)

    def pack_adapter(self, adapter: Adapter) -> int:
        return self._executor.pack_adapter(adapter)

    def keep_cores(self) -> AbstractContextManager[None]:
        return self._executor.keep_cores()

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        return self._executor.collective_rpc(method, args, timeout_s)

    def attach(self, entry: str, argument: bytes) -> dict[int, Connection]:
        return self._executor.attach(entry, argument)

    def close(self) -> None:
        self._executor.close()

    def rest(self) -> None:
        self._executor.rest()

    def do_idle_work(self, num_used_blocks: int, num_expected_blocks: int = 0) -> bool:
        return self._executor.do_idle_work(num_used_blocks, num_expected_blocks)

    def expert_loads(self) -> tuple[float, float]:
        return self._executor.expert_loads()

    def check_health(self) -> None:
        self._executor.check_health()


def outputs_of(outputs: Mapping[str, Sequence[int]]) -> Outputs:
    """Return a function that looks outputs up in a mapping."""
    return lambda request_id: outputs.get(request_id, ())
